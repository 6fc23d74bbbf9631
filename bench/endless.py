"""Texts without end on trained decoders: python -m bench.endless [--tokens N]

Steps of `generate(endless=True)` with memory and times by tenth of the text, and bits per byte of
held-out source code that is longer than the caches. Rows go to bench/results/endless.json.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np

from bench.train import corpus
from posenc_export.runtime import Session, load
from posenc_export.runtime.session.discarding import SINKS
from posenc_export.shared import json_rows
from posenc_export.shared.preset_folders import SOURCE_TREE

RESULTS = Path(__file__).parent / "results/endless.json"
PRESETS = ("small-rope", "small-alibi")
CAPACITY = 256  # the length of texts in training
BYTES = 20_000  # of held-out text
PARTS = 10
Text = List[int]
MakeRoom = Callable[[Session, Text], None]


def resident() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def written(session: Session, tokens: int) -> Dict[str, Any]:
    """Return memory and microseconds of a token, in each tenth of a text of `tokens` tokens."""
    stream = session.generate([list(b"def ")], tokens, temperature=1.0, stop=[], endless=True)
    memory, means, medians = [], [], []
    for _ in range(PARTS):
        times = []
        for _ in range(tokens // PARTS):
            start = time.process_time()
            next(stream)
            times.append(time.process_time() - start)
        memory.append(resident())
        means.append(round(statistics.fmean(times) * 1e6, 1))
        medians.append(round(statistics.median(times) * 1e6, 1))
    return {"tokens": tokens, "megabytes": memory, "mean": means, "median": medians}


def forgotten(after: int) -> MakeRoom:
    """Return a function that discards half of the tokens behind the first `after`."""
    return lambda session, text: session.discard((CAPACITY - after) // 2, after)


def read_again(session: Session, text: Text) -> None:
    """Begin again with the last half of the tokens."""
    session.reset()
    session.prefill([text[-CAPACITY // 2 :]])


def bits_per_byte(
    session: Session, text: Text, make_room: Callable[[Session, Text], None]
) -> float:
    """Return the mean bits per byte of a text, without its first CAPACITY bytes."""
    bits = []
    logits = session.prefill([text[:1]])[0, -1]
    for index, token in enumerate(text[1:], 1):
        numbers = logits.astype(np.float64)
        largest = numbers.max()
        nats = largest + np.log(np.exp(numbers - largest).sum()) - numbers[token]
        bits.append(nats / np.log(2))
        if session.room.min() < 1:
            make_room(session, text[:index])
        logits = session.step(np.array([token]))[0]
    return round(float(np.mean(bits[CAPACITY:])), 4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10**6, help="length of the written text")
    count, rows = parser.parse_args().tokens, []
    held_out = corpus()[1][:BYTES].tolist()
    ways = {
        f"discard, first {SINKS} stay": forgotten(SINKS),
        "discard, none stays": forgotten(0),
        "read the last half again": read_again,
    }
    for name in PRESETS:
        model = load(SOURCE_TREE / name, provider="cpu", threads=1)
        opened = {way: model.session(capacity=CAPACITY) for way in ways}
        losses = {way: bits_per_byte(opened[way], held_out, ways[way]) for way in ways}
        row = {"preset": name, "capacity": CAPACITY, "bits_per_byte": losses}
        rows.append({**row, **written(model.session(capacity=CAPACITY), count)})
        json_rows.write(RESULTS, {"rows": rows})
        print(rows[-1], flush=True)
