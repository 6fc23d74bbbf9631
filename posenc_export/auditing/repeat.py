"""A program that repeats the first wrong token with onnxruntime and numpy alone."""

import base64
import inspect
import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from posenc_export.auditing.graph import Arrays
from posenc_export.auditing.session import NONE, TAGS, ForeignSession, taken
from posenc_export.runtime.verification.scenarios import Cell

INLINE = 400  # finite numbers of an array that are written as numbers
NUMBERS = 16  # compared numbers of an output: those that differ most
MARK = "Written by posenc audit"
PROGRAM = """# {mark}. Needs {needs} and numpy.
# {title}.

from __future__ import annotations

import base64
import sys
import zlib

import numpy as np


def packed(text, dtype, shape):
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)


{taken}

path = sys.argv[1] if len(sys.argv) > 1 else {path!r}
{code}

caches = {{  # inputs, the outputs of the call before that they take, axes of rows and of slots
{caches}}}
calls = [  # inputs, and the slots [B,P] of each row of the caches that the call reads, or None
{calls}]
outputs = {{}}
for inputs, slots in calls:
    kept = {{past: outputs[present] for past, (present, *_) in caches.items() if outputs}}
    if slots is not None:
        kept = {{past: taken(kept[past], *axes, slots) for past, (_, *axes) in caches.items()}}
    outputs = run({{**kept, **inputs}})

columns = np.array({columns})
expected = np.array({expected})
actual = outputs[{output!r}][{row}, {column}, columns]
error = np.abs(actual - expected).max() / {scale!r}
print("actual  ", actual[:4])
print("expected", expected[:4])
print(f"error {{error:.1e}} of the largest output, tolerance {tolerance:.1e}")
sys.exit(not error <= {tolerance!r})
"""
Step = tuple[Arrays, np.ndarray | None]
Axes = tuple[str, int, int]


def program(
    session: ForeignSession, cell: Cell, place: int, limit: float, path: Path, graph: Any
) -> str:
    """Return the program for a wrong token; empty if the graph is right there.

    Args:
        session: keeps its inputs.
        place: of the token among all that the cell compares.
        limit: its largest right error, relative to the largest output of its comparison.
        graph: as Graph, read from the path.
    """
    token, right, scale = _compared(session, cell, place)
    own, (row, index, call) = token[:-TAGS], token[-TAGS:].astype(int).tolist()
    right = right[: len(own)]
    if np.abs(own.astype(np.float64) - right).max() / scale <= limit:
        return ""
    calls, caches = _chain(session, call)
    largest = np.argsort(-np.abs(own - right))[:NUMBERS]
    before = int(session.calls[call].before[row])
    title = f"{path.name}: '{cell.name}', row {row}, token {index} of the sequence"
    return PROGRAM.format(
        title=in_line(title),
        mark=MARK,
        code=graph.code,
        needs=graph.needs,
        path=str(path),
        taken=inspect.getsource(taken),
        caches="".join(f"    {past!r}: {how!r},\n" for past, how in caches.items()),
        calls="".join(map(_written, calls)),
        columns=largest.tolist(),
        expected=[float(f"{number:.7g}") for number in right[largest]],
        output=session.interface.output.name,
        row=row,
        column=int(np.argmax(session.calls[call].valid[row].cumsum() + before > index)),
        scale=float(f"{scale:.7g}"),
        tolerance=float(f"{limit:.3g}"),
    )


def _compared(
    session: ForeignSession, cell: Cell, place: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Run a cell up to a token. Return the token's outputs, the expected ones, and the largest
    expected output of the call.
    """
    session.reset()
    for actual, expected in cell.pairs(session):
        own, right = (array.reshape(-1, array.shape[-1]) for array in (actual, expected))
        if place < len(own):
            return own[place], right[place], float(np.abs(expected).max(initial=0)) or 1.0
        place -= len(own)
    raise AssertionError("the cell compared this token before")


def in_line(text: str) -> str:
    """Return a text with escapes if it has what a comment of one line in UTF-8 cannot have."""
    return text if text.isprintable() else ascii(text)


def _chain(session: ForeignSession, call: int) -> tuple[list[Step], dict[str, Axes]]:
    """Return the calls up to one, and how caches are passed on. If the session does more with
    caches than to take slots, only the last call, with its caches.
    """
    last, chain = session.calls[call], [session.calls[call]]
    while chain[0].source != NONE:
        chain.insert(0, session.calls[chain[0].source])
    calls = [(each.inputs, each.slots) for each in chain]
    calls[0] = ({**calls[0][0], **chain[0].caches}, None)
    known = session.interface.caches
    kept: Arrays = {}
    for each, after in itertools.pairwise(chain):
        results = session.run({**each.caches, **each.inputs})
        kept = {cache.past.name: results[cache.present] for cache in known}
        if after.slots is not None:
            kept = {
                c.past.name: taken(kept[c.past.name], c.rows, c.slots, after.slots) for c in known
            }
        if not all(np.array_equal(array, after.caches[name]) for name, array in kept.items()):
            return [({**last.inputs, **last.caches}, None)], {}
    return calls, {cache.past.name: (cache.present, cache.rows, cache.slots) for cache in known}


def _written(call: Step) -> str:
    inputs, slots = call
    lines = [f"        {name!r}: {_array(array)},\n" for name, array in inputs.items()]
    moved = "None" if slots is None else _array(slots)
    return "    ({\n" + "".join(lines) + f"    }}, {moved}),\n"


def _array(array: np.ndarray) -> str:
    if not array.size:
        return f"np.zeros({array.shape}, {array.dtype.name!r})"
    if array.size <= INLINE and np.isfinite(array).all():
        return f"np.array({array.tolist()}, {array.dtype.name!r})"
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()
    return f"packed({text!r}, {array.dtype.name!r}, {array.shape})"
