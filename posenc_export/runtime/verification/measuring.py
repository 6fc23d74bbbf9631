"""Measure the errors of an artefact: run every cell of the parity grid on sessions of its graph."""

import os
import queue
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from typing import Callable, Dict, Generator, Iterable, List, Optional, Sequence

import numpy as np

from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import grid_inputs, proof
from posenc_export.runtime.verification.case import Calls, Cell, Level
from posenc_export.runtime.verification.cells import Part, parts_of
from posenc_export.runtime.verification.proof import Accuracy, Expected, Measured
from posenc_export.shared.numerics import Errors, cell_error, division_tolerance, readout_tolerance
from posenc_export.shared.progress import EVERY, Steps

# Bytes of weights above which threads are used: one core reads them in 5 ms, Python's thread switch
# interval.
THREADED = 64 << 20
MOST_WORKERS = 4  # each worker needs its own caches and activations


def sessions(model: Model, threads: Optional[int]) -> List[Session]:
    """Open the sessions for `measure`: one with room for the full cache and, for large weights on
    one thread, smaller ones for worker threads.
    """
    whole = model.session(capacity=grid_inputs.fill_length(model.manifest))
    large = sum(file.bytes for file in model.manifest.files.values()) >= THREADED
    native = model.provider == "cpu" and graph_file(model.manifest) == "model.onnx"
    if not large or threads != 1 or not native:
        return [whole]
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    short = min(model.manifest.max_positions, grid_inputs.SHORT)
    return [whole, *(model.session(capacity=short) for _ in range(workers))]


def measure(
    session: Session,
    expected: Expected,
    accuracy: Accuracy,
    progress: Callable[[str], None],
    workers: Sequence[Session] = (),
    until_failure: bool = False,
    level: Level = Level.WHOLE,
) -> Measured:
    """Measure every cell of a grid.

    Args:
        session: runs the long sequence and, if there are no workers, all other cells.
        progress: called with one line of text at each stage, in the calling thread.
        workers: further sessions on the same graph, with a capacity of at least grid_inputs.SHORT
            tokens; each is used by one thread at a time.
        until_failure: stop at the first cell that exceeds its tolerance.
    """
    title, whole = f"{session.manifest.target}: verifying", level is Level.WHOLE
    progress(title)
    parts = parts_of(session.manifest, expected, accuracy.rounds, level)
    steps = Steps(progress, title, sum(len(part.cells()) for part in parts), "cells")
    ended: List[str] = []  # names of measured cells
    idle: "queue.SimpleQueue[Session]" = queue.SimpleQueue()
    for worker in workers or [session]:
        idle.put(worker)

    def end(cell: str) -> None:
        ended.append(cell)
        if not workers:
            steps.advance()

    def measured(part: Part) -> Measured:
        worker, columns = idle.get(), (expected.columns, expected.readout_columns)
        runs = session if part.long else worker
        try:
            return measure_cells(runs, part.cells(), accuracy, columns, until_failure, end)
        finally:
            idle.put(worker)

    total = Measured(unreached=expected.long.unreached() if whole and expected.long else {})
    results = _in_order(measured, parts, len(workers), lambda: steps.advance(len(ended)))
    with closing(results):
        for part, result in zip(parts, results, strict=True):
            total = total.joined(result)
            progress(f"{session.manifest.target}: verified {part.title}")
            if until_failure and result.exceeds(accuracy.tolerance):
                break
    return total


def _in_order(
    measured: Callable[[Part], Measured],
    parts: Sequence[Part],
    threads: int,
    meanwhile: Callable[[], None],
) -> Generator[Measured, None, None]:
    """Yield the result of each part in order. `meanwhile` is called while threads measure it."""
    if not threads:
        yield from map(measured, parts)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        for running in [pool.submit(measured, part) for part in parts]:
            while not wait([running], EVERY).done:
                meanwhile()
            yield running.result()
    finally:
        pool.shutdown(cancel_futures=True)


def measure_cells(
    session: Calls,
    cells: Iterable[Cell],
    accuracy: Accuracy,
    columns: Sequence[np.ndarray] = (),
    until_failure: bool = False,
    end: Callable[[str], None] = lambda name: None,
) -> Measured:
    """Measure cells one after the other on one session, until the first that fails if asked for.
    end: called with the name of each. columns: for each output, the indices of its expected
    numbers; empty for all.
    """
    result = Measured()
    for cell in cells:
        if cell.against in result.failures:  # there is nothing to compare it with
            continue
        of_output = columns[cell.of] if columns else None
        error = _error(session, cell, of_output, result.failures, accuracy.rounds)
        result.cells[cell.name] = proof.rounded_up(error)
        end(cell.name)
        if cell.of and accuracy.rounds:
            result.bounds[cell.name] = readout_tolerance(accuracy.noise, result.cells[cell.against])
        elif cell.against:
            error, most = result.cells[cell.against], accuracy.tolerance
            result.bounds[cell.name] = division_tolerance(accuracy.noise, error, most)
        if until_failure and result.exceeds(accuracy.tolerance):
            break
    return result


def _error(
    session: Calls,
    cell: Cell,
    columns: Optional[np.ndarray],
    failures: Dict[str, str],
    rounds: bool,
) -> float:
    """Run a cell and return its error; infinity, and a failure, if the graph fails."""
    if not cell.continues:
        session.reset()
    errors = Errors()
    try:
        for pair in cell.pairs(session):
            actual, expected = (
                output
                if columns is None or output.shape[-1] == len(columns)  # a file holds only these
                else output[..., columns]
                for output in pair
            )
            errors.add(actual, expected)
    except GraphError as error:
        failures[cell.name] = str(error)
        return float("inf")
    return cell_error(errors, rounds)
