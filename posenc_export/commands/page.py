"""`posenc page`: write a static page that runs a decoder in the browser."""

import argparse
import json
from pathlib import Path

from posenc_export.commands.options import add_folder


def add_arguments(paging: argparse.ArgumentParser) -> None:
    add_folder(
        paging, "the artefact of a decoder with a tokenizer or byte by byte, target ort or onnx"
    )
    paging.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="folder of the page: new, empty, or a page that is replaced",
    )
    package = (
        "folder of the npm package onnxruntime-web (default: in node_modules of the current "
        "folder, of build, or of a parent folder)"
    )
    paging.add_argument("--onnxruntime-web", type=Path, metavar="FOLDER", help=package)


def run(options: argparse.Namespace) -> int:
    from posenc_export.page import write

    options.say(f"{options.folder}: writing a page")
    write(options.folder, options.output, options.onnxruntime_web)
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    options.say.close()
    if options.json:
        print(json.dumps({"page": str(options.output / "index.html"), "bytes": size}))
    else:
        print(
            f"{options.output} ({size / 1e6:.1f} MB in all). Browsers need a server for it: "
            f"python -m http.server --directory {options.output} 8080"
        )
    return 0
