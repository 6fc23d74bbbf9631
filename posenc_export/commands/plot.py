"""`posenc plot`: draw a picture of an encoding."""

import argparse
import io
import json
from pathlib import Path

SUFFIXES = (".png", ".svg")
MADE_BY = "posenc plot"  # in the metadata of every picture, by which an earlier one is recognized


def add_arguments(plotting: argparse.ArgumentParser) -> None:
    """Add the arguments of `posenc plot`."""
    plotting.add_argument("encoding", help="NAME or NAME:PARAMETER=VALUE,...")
    plotting.add_argument("-o", "--output", type=Path, help="file ending in .png or .svg (default: NAME.png)")
    plotting.add_argument("--distance", type=int, default=255, help="largest distance between a query and a key, in tokens (default: 255)")
    plotting.add_argument("--head-size", type=int, default=64, help="entries of a head (default: 64)")
    plotting.add_argument("--positions", type=int, default=128, help="number of tokens in panels by position (default: 128)")


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status 0."""
    from posenc_export import encodings
    from posenc_export.catalogue.plots import View, draw
    from posenc_export.runtime.artefact.places import Form, check_file, write_file

    form = Form("plot", MADE_BY.encode())
    spec = encodings.parse(options.encoding)
    path = options.output or Path(f"{spec['name']}.png")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"plot: expected a file ending in {' or '.join(SUFFIXES)}, got {path.name!r}; give -o FILE.svg")
    check_file(path, form)
    drawn = io.BytesIO()
    named = {"Creator" if path.suffix == ".svg" else "Software": MADE_BY}
    draw(spec, View(options.distance, options.head_size, options.positions)).savefig(drawn, format=path.suffix[1:], dpi=150, metadata=named)
    write_file(path, drawn.getvalue(), form)
    print(json.dumps({"encoding": spec, "file": str(path)}) if options.json else path)
    return 0
