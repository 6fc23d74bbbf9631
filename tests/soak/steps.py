"""Check that memory does not grow over many steps: `python -m tests.soak.steps [--steps 1000000]
[--target T] [--json FILE]`.

Each target runs the steps in four ways: without interruption with a state of fixed size, and with
caches whose rows are rewound, reset, or exchanged. Exits with status 1 if the memory of the process
grows by more than LIMIT between 1 % of the steps (at least one cycle) and the end, if Python's
objects grow, or if the last outputs differ from those of a new session.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from posenc_export.runtime import Model, Session, load
from posenc_export.runtime.graphs import kernel_library
from posenc_export.shared.numerics import tolerance, worst_error
from tests.tiny import block

TARGETS = ("onnx", "onnx-static", "ort", "ort-native", "torchscript", "pt2")
LIMIT = 8 * 2**20  # most growth of the process in bytes
TRACED = 64 * 2**10  # most growth of Python's objects in bytes
LOW, HIGH = 64, 1024  # a row is rewound to LOW tokens when it has HIGH
ROWS, STAY = 3, 16  # number of rows, and steps between two exchanges of a row
CYCLE = 2 * (HIGH - LOW)  # steps after which all buffers have reached their final size
Steps = Iterator[np.ndarray]  # the output of each step


def straight(session: Session, text: np.ndarray) -> Steps:
    """Step one row up to the last position."""
    session.prefill(text[None, :1])
    place = 1
    while True:
        yield session.step(text[place % len(text)][None])
        place += 1


def rewinding(session: Session, text: np.ndarray) -> Steps:
    """Step one row; rewind it to LOW tokens when it has HIGH."""
    session.prefill(text[None, :LOW])
    while True:
        for place in range(LOW, HIGH):
            yield session.step(text[place][None])
        session.rewind(HIGH - LOW)


def resetting(session: Session, text: np.ndarray) -> Steps:
    """Step one row; reset it and prefill LOW tokens when it has HIGH."""
    while True:
        session.reset()
        session.prefill(text[None, :LOW])
        for place in range(LOW, HIGH):
            yield session.step(text[place][None])


def exchanging(session: Session, text: np.ndarray) -> Steps:
    """Step several rows; retire one and admit another every STAY steps."""
    session.admit([text[: LOW + row] for row in range(ROWS)])
    gone = 0
    while True:
        for _ in range(STAY):
            yield session.step(text[session.length])
        session.retire(gone % ROWS)
        session.admit(text[None, : LOW + gone % 7])
        gone += 1


WAYS: dict[str, Callable[[Session, np.ndarray], Steps]] = {
    "straight": straight,
    "rewinding": rewinding,
    "resetting": resetting,
    "exchanging": exchanging,
}


def ways(target: str) -> list[str]:
    """Return the ways that a target supports. Exchanging rows needs layout "rows"."""
    return [way for way in WAYS if way != "exchanging" or target != "onnx"]


def made(target: str, way: str, steps: int) -> Model:
    """Export a block with one layer; for the way "straight", with linear attention and one
    position per step.
    """
    from posenc_export.export import export
    from posenc_export.models.presets import seeded

    config = block("rope", max_positions=HIGH)
    if way == "straight":
        config = block("rope", max_positions=steps + 1, mechanism="linear", kv_heads=6)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch and other libraries during export
        export(seeded(config), target, Path(folder) / "artefact", verify=False)
        return load(Path(folder) / "artefact", provider="cpu", threads=1)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def traced_growth(model: Model, way: str, text: np.ndarray, steps: int) -> int:
    """Return the growth of Python's objects in bytes over a cycle, after a first cycle."""
    run = WAYS[way](model.session(), text)
    count = min(CYCLE, steps // 3)
    tracemalloc.start()
    try:
        for _ in range(count):
            next(run)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(count):
            next(run)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def soak(target: str, way: str, steps: int) -> dict[str, Any]:
    """Measure one target in one way. Return the figures, with a list of failures under "wrong"."""
    model = made(target, way, steps)
    text = np.random.default_rng(0).standard_normal((HIGH, 48)).astype(np.float32)
    objects = traced_growth(model, way, text, steps)
    session = model.session()
    run = WAYS[way](session, text)
    begin = min(max(steps // 100, CYCLE), steps // 2)
    for _ in range(begin):
        next(run)
    before, since = resident(), time.perf_counter()
    for _ in range(steps - begin - 1):
        next(run)
    seconds = time.perf_counter() - since
    grown, last = resident() - before, next(run)
    error = 0.0 if way == "straight" else _fresh_error(model, session, text, last)
    wrong = [f"memory grew by {grown} bytes"] if grown > LIMIT else []
    wrong += [f"objects grew by {objects} bytes"] if objects > TRACED else []
    if error > 1 or not np.isfinite(last).all():
        wrong.append(f"error {error:.2g} of what rounding explains")
    figures = {"steps_per_second": round((steps - begin - 1) / seconds), "grown": grown}
    figures |= {"objects_grown": objects, "error": round(error, 3)}
    return {"target": target, "way": way, "steps": steps, **figures, "wrong": wrong}


def _fresh_error(model: Model, session: Session, text: np.ndarray, last: np.ndarray) -> float:
    """Return the worst error of the last outputs against a new session that reads each row at
    once, relative to the tolerance.
    """
    worst = 0.0
    for row, length in enumerate(session.length):
        expected = model.session().prefill(text[None, :length])[0, -1]
        worst = max(worst, worst_error(last[row], expected) / tolerance("float32", 1, 96))
    return worst


def main(arguments: list[str] | None = None) -> int:
    """Run the measurements. Returns the exit status: 0, or 1 if there is a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--way", action="append", choices=list(WAYS))
    parser.add_argument("--json", type=Path, help="write the figures to FILE")
    options = parser.parse_args(arguments)
    figures = []
    targets = options.target or list(TARGETS)
    if not options.target and kernel_library.path() is None:
        targets.remove("ort-native")
        print(json.dumps({"target": "ort-native", "skipped": str(kernel_library.missing())}))
    for target in targets:
        for way in [way for way in ways(target) if way in (options.way or WAYS)]:
            # A new process, since memory left by earlier runs would hide growth.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                figures.append(pool.apply(soak, (target, way, options.steps)))
            print(json.dumps(figures[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if any(figure["wrong"] for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
