"""`posenc plot`: draw a picture of encodings."""

import argparse
import io
import json
from pathlib import Path
from typing import Any

from posenc_export.commands.options import Table, check_encoding, option
from posenc_export.runtime.artefact.destinations import Form, check_file, write_file
from posenc_export.shared.refusal import refusal

SUFFIXES = (".png", ".svg")
OPTIONS: Table = {
    "encodings": option(
        "NAME or NAME:PARAMETER=VALUE,... of encodings, which are drawn side by side",
        nargs="+",
        metavar="encoding",
    ),
    "-o --output": option("file ending in .png or .svg (default: NAME.png)", type=Path),
    "--distance": option("largest distance of query and key, in tokens", 255),
    "--head-size": option("entries of a head", 64),
    "--positions": option("number of tokens in panels by position", 128),
}


class Picture:
    """A file for a figure of a command, whose metadata name the command, so that it may be written
    again.

    Raises:
        ValueError: a path with another ending, or of a file that the command did not write.
    """

    def __init__(self, command: str, path: Path) -> None:
        self.path, self._made_by = path, f"posenc {command}"
        self._form = Form(command, self._made_by.encode())
        if path.suffix not in SUFFIXES:
            rule = f"a file ending in {' or '.join(SUFFIXES)}"
            raise refusal(command, rule, repr(path.name), "give -o FILE.svg")
        check_file(path, self._form)

    def write(self, figure: Any) -> None:
        """Write a figure of matplotlib."""
        drawn, kind = io.BytesIO(), self.path.suffix[1:]
        named = {"Creator" if kind == "svg" else "Software": self._made_by}
        figure.savefig(drawn, format=kind, dpi=150, metadata=named)
        write_file(self.path, drawn.getvalue(), self._form)


def run(options: argparse.Namespace) -> int:
    for text in options.encodings:
        check_encoding(text)
    from posenc_export import encodings
    from posenc_export.catalogue.plots import View, draw

    names = "-".join(text.partition(":")[0] for text in options.encodings)
    picture = Picture("plot", options.output or Path(f"{names}.png"))
    specs = [encodings.parse(text) for text in options.encodings]
    picture.write(draw(specs, View(options.distance, options.head_size, options.positions)))
    written = {"encodings": specs, "file": str(picture.path)}
    print(json.dumps(written) if options.json else picture.path)
    return 0
