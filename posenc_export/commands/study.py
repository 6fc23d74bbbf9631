"""`posenc study`: train a small decoder with each encoding, and compare how well they predict texts
that are longer than those in training.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from posenc_export.commands.options import Table, check_encoding, option
from posenc_export.commands.plot import Picture
from posenc_export.commands.terminal import show
from posenc_export.shared.refusal import refusal

BESIDE = ("rope", "alibi")
TIMES = (1, 2, 4, 8)  # contexts that are tried, by the length in training
PLACES, RATE = 48, 3e-3
OPTIONS: Table = {
    "encodings": option(
        f"NAME or NAME:PARAMETER=VALUE,... of encodings; {' and '.join(BESIDE)} are trained, too",
        nargs="+",
        metavar="encoding",
    ),
    "-o --output": option("file ending in .png or .svg (default: study.png)", type=Path),
    "--steps": option("of training, with 16 texts each", 600, least=1),
    "--length": option("bytes of a text in training", 128, least=8),
    "--text": option(
        "file to train on, whose last twentieth is held out (default: the source code of Python's "
        "standard library)",
        type=Path,
    ),
    "--seed": option("of weights and of the order of texts", 0, least=0),
}


def run(options: argparse.Namespace) -> int:
    for name in options.encodings:
        check_encoding(name)
    from posenc_export import encodings
    from posenc_export.models.presets import seeded, small

    picture = Picture("study", options.output or Path("study.png"))
    lengths = [times * options.length for times in TIMES]
    texts = _texts(options.text, lengths[-1] + PLACES)
    models = {
        name: seeded(small(encodings.parse(name), lengths[-1]), options.seed)
        for name in dict.fromkeys((*options.encodings, *BESIDE))
    }
    bits = {}
    for name, model in models.items():
        options.say(f"{name}: training")
        bits[name] = _bits(model, texts, lengths, options)
    options.say.close()
    picture.write(_drawn(bits))
    rows = [{"encoding": name, "bits": of} for name, of in bits.items()]
    if options.json:
        print(json.dumps({"file": str(picture.path), "rows": rows}))
        return 0
    cells = {name: {f"{n} bytes": f"{b:.2f}" for n, b in of.items()} for name, of in bits.items()}
    show([{"bits per byte": name, **of} for name, of in cells.items()])
    print(picture.path)
    return 0


def _texts(path: Any, least: int) -> tuple[Any, Any]:
    """Return bytes for training and those that are held out, uint8. least: number of each."""
    import torch

    from posenc_export.models.training import HELD_OUT, python_source

    if path is None:
        return python_source()
    text = torch.frombuffer(bytearray(path.read_bytes() or b"\0"), dtype=torch.uint8)
    end = len(text) - len(text) // HELD_OUT
    if len(text) - end < least:
        rule = f"a text of at least {least * HELD_OUT} bytes"
        raise refusal(f"study: {path}", rule, len(text), "give a longer one, or a smaller --length")
    return text[:end], text[end:]


def _bits(model: Any, texts: tuple[Any, Any], lengths: list[int], options: Any) -> dict[int, float]:
    """Train a decoder, and return its bits per byte at each length of context."""
    from posenc_export.models.randomness import drawn_from
    from posenc_export.models.training import bits_per_byte, fit, initialise

    with drawn_from(options.seed):
        initialise(model)
        fit(model.train(), texts[0], options.steps, options.length, RATE, options.say)
    model.eval()
    rest = (PLACES, options.length // 2, lengths[-1])
    return {length: bits_per_byte(model, texts[1], length, *rest) for length in lengths}


def _drawn(bits: dict[str, dict[int, float]]) -> Any:
    """Draw the bits per byte of each encoding by bytes of context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name, of in bits.items():
        lengths = list(of)
        axes.plot(lengths, list(of.values()), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.axvline(lengths[0], color="0.7", linestyle=":", label="length in training")
    axes.set_xlabel("bytes of context (logarithmic)")
    axes.set_ylabel("bits per byte; less is better")
    axes.legend(fontsize=8)
    return figure
