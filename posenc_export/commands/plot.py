"""`posenc plot`: draw a picture of an encoding."""

import argparse
import io
import json
from pathlib import Path

from posenc_export.commands.options import Table, option
from posenc_export.runtime.artefact.places import Form, check_file, write_file
from posenc_export.shared.refusal import refusal

SUFFIXES = (".png", ".svg")
MADE_BY = "posenc plot"  # in the metadata of every picture, by which an earlier one is recognized
OPTIONS: Table = {
    "encoding": option("NAME or NAME:PARAMETER=VALUE,... of an encoding"),
    "-o --output": option("file ending in .png or .svg (default: NAME.png)", type=Path),
    "--distance": option("largest distance of query and key, in tokens", 255),
    "--head-size": option("entries of a head", 64),
    "--positions": option("number of tokens in panels by position", 128),
}


def run(options: argparse.Namespace) -> int:
    from posenc_export import encodings
    from posenc_export.catalogue.plots import View, draw

    name = options.encoding.partition(":")[0]
    form, path = Form("plot", MADE_BY.encode()), options.output or Path(f"{name}.png")
    if path.suffix not in SUFFIXES:
        rule = f"a file ending in {' or '.join(SUFFIXES)}"
        raise refusal("plot", rule, repr(path.name), "give -o FILE.svg")
    check_file(path, form)
    spec = encodings.parse(options.encoding)
    figure = draw(spec, View(options.distance, options.head_size, options.positions))
    drawn = io.BytesIO()
    named = {"Creator" if path.suffix == ".svg" else "Software": MADE_BY}
    figure.savefig(drawn, format=path.suffix[1:], dpi=150, metadata=named)
    write_file(path, drawn.getvalue(), form)
    print(json.dumps({"encoding": spec, "file": str(path)}) if options.json else path)
    return 0
