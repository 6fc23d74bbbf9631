"""`posenc page`: write a static page that runs a decoder in the browser."""

import argparse
import json
from pathlib import Path

from posenc_export.commands.options import Table, folder_of, option
from posenc_export.page import write_page

OPTIONS: Table = {
    **folder_of("the artefact of a decoder, target ort or onnx"),
    "-o --output": option(
        "folder of the page: new, empty, or a page that is replaced", type=Path, required=True
    ),
    "--onnxruntime-web": option(
        "folder of the npm package onnxruntime-web (default: in node_modules of the current "
        "folder, of build, or of a parent folder)",
        type=Path,
        metavar="FOLDER",
    ),
}


def run(options: argparse.Namespace) -> int:
    options.say(f"{options.folder}: writing a page")
    write_page(options.folder, options.output, options.onnxruntime_web)
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    options.say.close()
    if options.json:
        print(json.dumps({"page": str(options.output / "index.html"), "bytes": size}))
    else:
        said = f"{options.output} ({size / 1e6:.1f} MB in all). Browsers need a server for it"
        print(f"{said}: python -m http.server --directory {options.output} 8080")
    return 0
