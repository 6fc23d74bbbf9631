"""`posenc plot`: draw a picture of an encoding, or of the encodings of an artefact."""

import argparse
import io
import json
import os
from pathlib import Path
from typing import Any, Dict, Tuple

from posenc_export.commands.options import Table, option
from posenc_export.runtime.artefact.places import Form, check_file, write_file
from posenc_export.shared.preset_folders import NAMES
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

SUFFIXES = (".png", ".svg")
MADE_BY = "posenc plot"  # in the metadata of every picture, by which an earlier one is recognized
OPTIONS: Table = {
    "encoding": option(
        "NAME or NAME:PARAMETER=VALUE,... of an encoding; or the folder of an artefact or a "
        "preset, whose trained encodings are drawn"
    ),
    "-o --output": option("file ending in .png or .svg (default: NAME.png)", type=Path),
    "--distance": option(
        "largest distance of query and key, in tokens; at most the range of an artefact", 255
    ),
    "--head-size": option("entries of a head (default: 64; an artefact has its own)", type=int),
    "--positions": option("number of tokens in panels by position", 128),
    "--layer": option(
        "draw only the encodings of this layer of an artefact (default: each different one)",
        type=int,
    ),
}


def run(options: argparse.Namespace) -> int:
    form = Form("plot", MADE_BY.encode())
    path = options.output or Path(f"{_name(options.encoding)}.png")
    if path.suffix not in SUFFIXES:
        rule = f"a file ending in {' or '.join(SUFFIXES)}"
        raise refusal("plot", rule, repr(path.name), "give -o FILE.svg")
    check_file(path, form)
    source = _of_artefact if _is_artefact(options.encoding) else _of_encoding
    figure, described = source(options)
    drawn = io.BytesIO()
    named = {"Creator" if path.suffix == ".svg" else "Software": MADE_BY}
    figure.savefig(drawn, format=path.suffix[1:], dpi=150, metadata=named)
    write_file(path, drawn.getvalue(), form)
    print(json.dumps({**described, "file": str(path)}) if options.json else path)
    return 0


def _is_artefact(text: str) -> bool:
    """Whether a text is a folder or a preset. rope is an encoding, and ./rope a folder."""
    from posenc_export.encodings import KNOWN

    place = text in NAMES or os.sep in text or Path(text).is_dir()
    return place and text.partition(":")[0] not in KNOWN


def _name(text: str) -> str:
    return Path(text).resolve().name if _is_artefact(text) else text.partition(":")[0]


def _of_encoding(options: argparse.Namespace) -> Tuple[Any, Dict[str, Any]]:
    from posenc_export import encodings
    from posenc_export.catalogue.plots import View, draw

    if options.layer is not None:
        rule = "--layer with the folder of an artefact"
        raise refusal("plot", rule, f"the encoding {options.encoding}", "leave it out")
    name = options.encoding.partition(":")[0]
    if name not in encodings.KNOWN:
        near = suggestion(name, [*encodings.KNOWN, *NAMES])
        remedy = near if near.startswith("did") else "posenc list shows the names"
        rule = "the name of an encoding or a preset, or the folder of an artefact"
        raise refusal("plot", rule, repr(options.encoding), remedy)
    spec = encodings.parse(options.encoding)
    size = View.head_size if options.head_size is None else options.head_size
    return draw(spec, View(options.distance, size, options.positions)), {"encoding": spec}


def _of_artefact(options: argparse.Namespace) -> Tuple[Any, Dict[str, Any]]:
    """Return the picture of the encodings of an artefact, and what it shows, for --json."""
    from posenc_export.catalogue.of_models import subjects
    from posenc_export.catalogue.plots import View, draw_all
    from posenc_export.export.trained_numbers import with_trained_encodings

    if options.head_size is not None:
        rule = "no --head-size with an artefact, which has its own"
        raise refusal("plot", rule, options.head_size, "leave it out")
    view = View(options.distance, positions=options.positions)
    trained = with_trained_encodings(options.encoding)
    drawn = subjects(trained, _name(options.encoding), options.layer)
    specs = [subject.spec for subject in drawn]
    return draw_all(drawn, view), {"artefact": options.encoding, "encodings": specs}
