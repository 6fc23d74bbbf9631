"""Measuring whether an artefact gives what it must: every cell of the grid of scenarios on sessions of one loaded graph.

Shapes: B batch, L tokens of a sequence, V numbers of an output.
"""

import functools
import math
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence

import numpy as np

from posenc_export.numerics import worst_error
from posenc_export.runtime.errors import GraphError
from posenc_export.runtime.guests import WithGuests
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.model import Model
from posenc_export.runtime.proof import BATCHES, SHORT, Beside, Expected, encoder_rows, fill_chunk, fill_length, is_large, rounded_up
from posenc_export.runtime.rules import graph_file
from posenc_export.runtime.scenarios import Case, Pairs, Scenario, admitted, grid, grid_of_last_outputs, grid_of_whole_calls
from posenc_export.runtime.session import Session

GUEST_LENGTH = 8  # tokens that a guest row may need
THREADED = 64 << 20  # bytes of weights that one core reads in 5 ms, the time for which Python lets a thread run
MOST_WORKERS = 4  # each has caches and activations of its own


@dataclass(frozen=True)
class Part:
    """Cells that one worker measures, one after the other.

    Args:
        title: of the part.
        cells: what a session goes through, by name; pairs of actual and expected outputs.
        long: whether it takes more than SHORT tokens.
    """

    title: str
    cells: Dict[str, Callable[[Session], Pairs]]
    long: bool = False


def sessions(model: Model, threads: Optional[int]) -> List[Session]:
    """What measures a model: a session for the full cache and, where the weights are large, smaller ones for the threads that measure beside each other.

    Args:
        threads: of one operator, as the model was loaded.
    """
    whole = model.session(capacity=fill_length(model.manifest))
    large = sum(file.bytes for file in model.manifest.files.values()) >= THREADED
    if not large or threads != 1 or model.provider != "cpu" or graph_file(model.manifest) != "model.onnx":
        return [whole]
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    return [whole, *(model.session(capacity=min(model.manifest.max_positions, SHORT)) for _ in range(workers))]


def measure(session: Session, expected: Expected, progress: Callable[[str], None], beside: Sequence[Session] = ()) -> Dict[str, float]:
    """The worst error of every cell of the grid, by name, relative to the largest expected output.

    Args:
        session: what fills a cache and, where there are no others, goes through all cells.
        progress: called with a line at each stage, in this thread.
        beside: on the same graph, of at least SHORT tokens; each has a thread of its own.
    """
    progress(f"{session.manifest.target}: verifying")
    parts = _parts(session.manifest, expected)
    cells: Dict[str, float] = {}
    idle: "queue.SimpleQueue[Session]" = queue.SimpleQueue()
    for own in beside or [session]:
        idle.put(own)

    def measured(part: Part) -> Dict[str, float]:
        own = idle.get()
        try:
            return {name: rounded_up(_worst(session if part.long else own, expected.columns, pairs)) for name, pairs in part.cells.items()}
        finally:
            idle.put(own)

    pool = ThreadPoolExecutor(len(beside)) if beside else None
    try:
        for part, found in zip(parts, pool.map(measured, parts) if pool else map(measured, parts), strict=True):
            cells |= found
            progress(f"{session.manifest.target}: verified {part.title}")
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    return cells


def _parts(manifest: Manifest, expected: Expected) -> List[Part]:
    """All cells, the parts with most work first: workers then end at about the same time."""
    parts = []
    if expected.filled is not None:
        tokens, last = expected.filled
        parts.append(Part("a full cache", {"cache filled to its end": functools.partial(_filled, tokens=tokens, last=last)}, long=True))
    for batch in sorted(BATCHES, reverse=True):
        for start, largest in expected.cases.items():
            if start and batch == min(BATCHES) and is_large(manifest):
                continue
            case, name = largest.rows(batch), f"batch {batch}, start {start}"
            scenarios = _scenarios(manifest, case)
            parts.append(Part(name, {f"{name}: {cell}": _on(scenario, case) for cell, scenario in scenarios.items()}))
    if expected.beside is not None:
        name, read = ("coordinates", _coordinates) if manifest.axes else ("segments", _segments)
        parts.append(Part(name, {name: functools.partial(read, beside=expected.beside)}))
    return parts


def _on(scenario: Scenario, case: Case) -> Callable[[Session], Pairs]:
    return lambda session: scenario(session, case)


def _worst(session: Session, columns: np.ndarray, pairs: Callable[[Session], Pairs]) -> float:
    """The worst error of what a scenario yields on an empty session."""
    session.reset()
    try:
        return max(worst_error(_of(columns, actual), _of(columns, wanted)) for actual, wanted in pairs(session))
    except GraphError:  # no answer is as far from the right one as any
        return math.inf


def _of(columns: np.ndarray, output: np.ndarray) -> np.ndarray:
    """The compared numbers of an output; what is expected may hold these only."""
    return output if output.shape[-1] == len(columns) else output[..., columns]


def _scenarios(manifest: Manifest, case: Case) -> Dict[str, Scenario]:
    """What the artefact must go through, by name; where rows fill their own slots, with rows that come and go too."""
    length = case.tokens.shape[1]
    if not manifest.states:
        return grid_of_whole_calls(length)
    alone = {**grid(length), **(grid_of_last_outputs() if manifest.input("logits_index") else {})}
    if manifest.layout == "columns" or length < GUEST_LENGTH:
        return alone
    cells = {**alone, "rows come and go": admitted}
    if case.start == 0 and len(case.tokens) > 1:
        cells |= {f"{name}, beside guests": _beside_guests(scenario) for name, scenario in alone.items()}
    return cells


def _beside_guests(scenario: Scenario) -> Scenario:
    """The scenario on rows that share their batch with others."""
    return lambda session, case: scenario(WithGuests(session, case.other[::-1].copy(), 1, case.encoder and case.encoder[::-1]), case)  # type: ignore[arg-type]


def _coordinates(session: Session, beside: Beside) -> Pairs:
    """Every token at a place of its own on every axis, in chunks; then back and again: what is fed behind a rewind has its coordinates too."""
    yield session.prefill(beside.tokens, chunk=7, grid=beside.numbers), beside.full
    for back in range(1, min(6, beside.tokens.shape[1])) if session.manifest.states else ():
        session.rewind(back)
        yield session.prefill(beside.tokens[:, -back:], grid=beside.numbers[:, :, -back:]), beside.full[:, -back:]


def _segments(session: Session, beside: Beside) -> Pairs:
    """Every token of a segment of its own, behind padding."""
    yield session.prefill(beside.tokens, attention_mask=beside.mask, token_types=beside.numbers), beside.full


def _filled(session: Session, tokens: np.ndarray, last: np.ndarray) -> Pairs:
    """A prompt in chunks up to the last position, the last token as a step; compared where something is expected."""
    length, compared, chunk = tokens.shape[1], tokens.shape[1] - last.shape[1], fill_chunk(session.manifest)
    for first in range(0, max(length - 1, 1), chunk):
        end = min(first + chunk, max(length - 1, 1))
        begin, encoder = max(compared, first), encoder_rows(session.manifest, 1) if first == 0 else None
        made = session.prefill(tokens[:, first:end], encoder=encoder, logits_to_keep=max(end - begin, 1))
        if begin < end:
            yield made, last[:, begin - compared : end - compared]
    if length > 1:
        yield session.step(tokens[:, -1]), last[:, -1]
