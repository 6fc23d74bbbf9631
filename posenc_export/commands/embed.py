"""`posenc embed`: sentence embeddings of the lines of a text file."""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from posenc_export.commands.loading import loaded, model_of
from posenc_export.commands.options import PROVIDER, THREADS, Table, option
from posenc_export.runtime.session.model import check_embeds

TOGETHER = 1024  # texts that are sorted by length and read before the next ones
ARRAY = ".npy"
OPTIONS: Table = {
    **model_of("an artefact with output sentence_embedding"),
    "file": option("text with one text per line, in UTF-8; - for standard input"),
    "-o --output": option(
        f"file to write: {ARRAY} for an array [lines,size] float32, any other name for JSON lines "
        "(default: JSON lines to standard output)",
        type=Path,
        metavar="FILE",
    ),
    "--prompt": option(
        "name of a prompt of the checkpoint to put before each text (default: its default "
        "prompt, if it has one)",
        metavar="NAME",
    ),
    **PROVIDER,
    **THREADS,
}


def run(options: argparse.Namespace) -> int:
    texts = _lines(options.file)
    model = loaded(options, options.folder, check_embeds, options.threads)
    parts = _embedded(options, model, texts)
    if options.output is None:
        sys.stdout.writelines(_rows(parts))
    else:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("wb") as file:
            if options.output.suffix == ARRAY:
                np.save(file, np.concatenate([model.embed([]), *parts]))
            else:
                file.writelines(line.encode() for line in _rows(parts))
    options.say.close()
    return 0


def _lines(name: str) -> list[str]:
    """The lines of a file, or of standard input, which only line feeds end."""
    content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    lines = content.decode("utf-8-sig", "replace").split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def _embedded(options: argparse.Namespace, model: Any, texts: list[str]) -> Iterator[np.ndarray]:
    for begin in range(0, len(texts), TOGETHER):
        yield model.embed(texts[begin : begin + TOGETHER], options.prompt)
        if len(texts) > TOGETHER:
            options.say(f"{min(begin + TOGETHER, len(texts))} of {len(texts)} texts")


def _rows(parts: Iterator[np.ndarray]) -> Iterator[str]:
    for row in itertools.chain.from_iterable(parts):
        # the shortest numbers that give the same float32
        yield f"[{', '.join(map(str, row))}]\n"
