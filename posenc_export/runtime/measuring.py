"""Measure the errors of an artefact: run every cell of the parity grid on sessions of one loaded graph and compare with the expected outputs.

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
from posenc_export.runtime.proof import BATCHES, SHORT, AttributeCase, Expected, encoder_rows, fill_chunk, fill_length, is_large, rounded_up
from posenc_export.runtime.rules import graph_file
from posenc_export.runtime.scenarios import Case, Pairs, Scenario, admitted, grid, grid_of_last_outputs, grid_of_whole_calls
from posenc_export.runtime.session import Session

GUEST_LENGTH = 8  # shortest sequence for which guest rows are tested: tokens that a guest may read
THREADED = 64 << 20  # bytes of weights above which threads are used: one core reads them in 5 ms, Python's thread switch interval
MOST_WORKERS = 4  # each worker needs its own caches and activations


@dataclass(frozen=True)
class Part:
    """Cells that one worker measures in sequence.

    Args:
        title: name for progress messages.
        cells: by name, a function that drives a session and yields pairs of actual and expected outputs.
        long: whether the cells need more than SHORT tokens.
    """

    title: str
    cells: Dict[str, Callable[[Session], Pairs]]
    long: bool = False


def sessions(model: Model, threads: Optional[int]) -> List[Session]:
    """Open the sessions for `measure`: one with room for the full cache and, for large weights, smaller ones for worker threads.

    Args:
        threads: threads per operator that the model was loaded with.
    """
    whole = model.session(capacity=fill_length(model.manifest))
    large = sum(file.bytes for file in model.manifest.files.values()) >= THREADED
    if not large or threads != 1 or model.provider != "cpu" or graph_file(model.manifest) != "model.onnx":
        return [whole]
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    return [whole, *(model.session(capacity=min(model.manifest.max_positions, SHORT)) for _ in range(workers))]


def measure(session: Session, expected: Expected, progress: Callable[[str], None], workers: Sequence[Session] = ()) -> Dict[str, float]:
    """Return the worst error of every cell of the grid, by name, relative to the largest expected output.

    Args:
        session: runs the cell that fills a cache and, if there are no workers, all other cells.
        progress: called with one line of text at each stage, in the calling thread.
        workers: further sessions on the same graph, with a capacity of at least SHORT tokens; each is used by one thread at a time.
    """
    progress(f"{session.manifest.target}: verifying")
    parts = _parts(session.manifest, expected)
    cells: Dict[str, float] = {}
    idle: "queue.SimpleQueue[Session]" = queue.SimpleQueue()
    for worker in workers or [session]:
        idle.put(worker)

    def measured(part: Part) -> Dict[str, float]:
        worker = idle.get()
        try:
            return {name: rounded_up(_worst(session if part.long else worker, expected.columns, pairs)) for name, pairs in part.cells.items()}
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(len(workers)) if workers else None
    try:
        for part, found in zip(parts, pool.map(measured, parts) if pool else map(measured, parts), strict=True):
            cells |= found
            progress(f"{session.manifest.target}: verified {part.title}")
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    return cells


def _parts(manifest: Manifest, expected: Expected) -> List[Part]:
    """Return all cells, the largest parts first, so that the workers finish at about the same time."""
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
    for name, (given, full) in expected.attribute_cases.items():
        parts.append(Part(name, {name: functools.partial(ATTRIBUTE_CELLS[name], case=given, full=full)}))
    return parts


def _on(scenario: Scenario, case: Case) -> Callable[[Session], Pairs]:
    return lambda session: scenario(session, case)


def _worst(session: Session, columns: np.ndarray, pairs: Callable[[Session], Pairs]) -> float:
    """Run a scenario on an empty session and return its worst error; infinity if the graph fails."""
    session.reset()
    try:
        return max(worst_error(_of(columns, actual), _of(columns, wanted)) for actual, wanted in pairs(session))
    except GraphError:
        return math.inf


def _of(columns: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Select the compared columns of an output. Expected outputs from a file hold only these columns."""
    return output if output.shape[-1] == len(columns) else output[..., columns]


def _scenarios(manifest: Manifest, case: Case) -> Dict[str, Scenario]:
    """Return the scenarios for an artefact, by name. Layout "rows" adds scenarios in which rows are admitted and retired."""
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
    """Return the scenario run on a batch that guest rows join and leave."""
    return lambda session, case: scenario(WithGuests(session, case.other[::-1].copy(), 1, case.encoder and case.encoder[::-1]), case)  # type: ignore[arg-type]


def _coordinates(session: Session, case: AttributeCase, full: np.ndarray) -> Pairs:
    """Prefill in chunks with different coordinates for every token, then rewind and prefill the last tokens again with their coordinates."""
    grid = case.attributes["grid"]
    yield session.prefill(case.tokens, chunk=7, grid=grid), full
    for back in range(1, min(6, case.tokens.shape[1])) if session.manifest.states else ():
        session.rewind(back)
        yield session.prefill(case.tokens[:, -back:], grid=grid[:, :, -back:]), full[:, -back:]


def _segments(session: Session, case: AttributeCase, full: np.ndarray) -> Pairs:
    """Prefill tokens of different segments, with coordinates if the model has them, the first row with left padding."""
    attributes = case.attributes
    yield session.prefill(case.tokens, attention_mask=case.mask, grid=attributes.get("grid"), token_types=attributes.get("token_types")), full


ATTRIBUTE_CELLS = {"coordinates": _coordinates, "segments": _segments}


def _filled(session: Session, tokens: np.ndarray, last: np.ndarray) -> Pairs:
    """Fill the cache to its end: all tokens but the last in chunks, the last as a step. Yields only the outputs for which `last` has expected values."""
    length, compared, chunk = tokens.shape[1], tokens.shape[1] - last.shape[1], fill_chunk(session.manifest)
    for first in range(0, max(length - 1, 1), chunk):
        end = min(first + chunk, max(length - 1, 1))
        begin, encoder = max(compared, first), encoder_rows(session.manifest, 1) if first == 0 else None
        made = session.prefill(tokens[:, first:end], encoder=encoder, logits_to_keep=max(end - begin, 1))
        if begin < end:
            yield made, last[:, begin - compared : end - compared]
    if length > 1:
        yield session.step(tokens[:, -1]), last[:, -1]
