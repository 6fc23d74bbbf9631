"""Measure the errors of an artefact: run every cell of the parity grid on sessions of one loaded
graph and compare with the expected outputs (cells.py).
"""

import os
import queue
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Callable, Collection, Dict, Iterable, Iterator, List, Optional, Sequence

import numpy as np

from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import proof
from posenc_export.runtime.verification.cell import Cell
from posenc_export.runtime.verification.cells import Part, parts_of
from posenc_export.runtime.verification.long_sequence import SHORT, fill_length
from posenc_export.runtime.verification.proof import Accuracy, Expected, Measured
from posenc_export.shared.numerics import Errors, cell_error, division_tolerance, readout_tolerance
from posenc_export.shared.progress import EVERY, Steps

# Bytes of weights above which threads are used: one core reads them in 5 ms, Python's thread switch
# interval.
THREADED = 64 << 20
MOST_WORKERS = 4  # each worker needs its own caches and activations


def sessions(model: Model, threads: Optional[int]) -> List[Session]:
    """Open the sessions for `measure`: one with room for the full cache and, for large weights,
    smaller ones for worker threads.

    Args:
        threads: threads per operator that the model was loaded with.
    """
    whole = model.session(capacity=fill_length(model.manifest))
    large = sum(file.bytes for file in model.manifest.files.values()) >= THREADED
    if (
        not large
        or threads != 1
        or model.provider != "cpu"
        or graph_file(model.manifest) != "model.onnx"
    ):
        return [whole]
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    return [
        whole,
        *(model.session(capacity=min(model.manifest.max_positions, SHORT)) for _ in range(workers)),
    ]


def measure(
    session: Session,
    expected: Expected,
    accuracy: Accuracy,
    progress: Callable[[str], None],
    workers: Sequence[Session] = (),
    until_failure: bool = False,
    only: Collection[str] = (),
) -> Measured:
    """Measure every cell of the grid.

    Args:
        session: runs the long sequence and, if there are no workers, all other cells.
        accuracy: whether the graph rounds activations, and its tolerance.
        progress: called with one line of text at each stage, in the calling thread.
        workers: further sessions on the same graph, with a capacity of at least long_sequence.SHORT
            tokens; each is used by one thread at a time.
        until_failure: stop at the first cell that exceeds its tolerance.
        only: names of the scenarios to run, on the larger batch, such as scenarios.QUICK; empty for
            the whole grid.
    """
    progress(f"{session.manifest.target}: verifying")
    parts = parts_of(session.manifest, expected, accuracy, only)
    steps = Steps(
        progress,
        f"{session.manifest.target}: verifying",
        sum(part.count for part in parts),
        "cells",
    )
    ended: List[str] = []  # names of measured cells
    total = Measured(unreached={} if only or not expected.long else expected.long.unreached())
    idle: "queue.SimpleQueue[Session]" = queue.SimpleQueue()
    for worker in workers or [session]:
        idle.put(worker)

    def end(cell: str) -> None:
        ended.append(cell)
        if not workers:
            steps.advance()

    def measured(part: Part) -> Measured:
        worker = idle.get()
        try:
            return _measured(
                session if part.long else worker,
                part,
                (expected.columns, expected.readout_columns),
                accuracy,
                until_failure,
                end,
            )
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(len(workers)) if workers else None
    try:
        found = (
            _in_order(pool, measured, parts, lambda: steps.advance(len(ended)))
            if pool
            else map(measured, parts)
        )
        for part, errors in zip(parts, found, strict=True):
            total = total.joined(errors)
            progress(f"{session.manifest.target}: verified {part.title}")
            if until_failure and errors.exceeds(accuracy.tolerance):
                break
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    return total


def _in_order(
    pool: ThreadPoolExecutor,
    measured: Callable[[Part], Measured],
    parts: Sequence[Part],
    meanwhile: Callable[[], None],
) -> Iterator[Measured]:
    """Yield what threads measure, in the order of the parts; call `meanwhile` from this thread
    while it waits.
    """
    for running in [pool.submit(measured, part) for part in parts]:
        while not wait([running], EVERY).done:
            meanwhile()
        yield running.result()


def _measured(
    session: Session,
    part: Part,
    columns: Sequence[np.ndarray],
    accuracy: Accuracy,
    until_failure: bool,
    end: Callable[[str], None],
) -> Measured:
    return measure_cells(session, part.cells(session), accuracy, columns, until_failure, end)


def measure_cells(
    session: Session,
    cells: Iterable[Cell],
    accuracy: Accuracy,
    columns: Sequence[np.ndarray] = (),
    until_failure: bool = False,
    end: Callable[[str], None] = lambda name: None,
) -> Measured:
    """Measure cells one after the other on one session.

    Args:
        columns: for each output, the indices of its numbers that have expected values; empty for
            all.
        until_failure: stop at the first cell that exceeds its tolerance.
        end: called with the name of each measured cell.
    """
    result = Measured()
    for cell in cells:
        error = _error(
            session, cell, columns[cell.of] if columns else None, result.failures, accuracy.rounds
        )
        result.cells[cell.name] = proof.rounded_up(error)
        end(cell.name)
        if cell.of and accuracy.rounds:
            result.bounds[cell.name] = readout_tolerance(accuracy.noise, result.cells[cell.against])
        elif cell.against:
            result.bounds[cell.name] = division_tolerance(
                accuracy.noise, result.cells[cell.against], accuracy.tolerance
            )
        if until_failure and result.exceeds(accuracy.tolerance):
            break
    return result


def _error(
    session: Session,
    cell: Cell,
    columns: Optional[np.ndarray],
    failures: Dict[str, str],
    rounds: bool,
) -> float:
    """Run a cell and return its error; infinity if the graph fails, whose message is then added
    to `failures`.
    """
    if not cell.continues:
        session.reset()
    errors = Errors()
    try:
        for pair in cell.pairs(session):
            errors.add(
                *(
                    output
                    if columns is None or output.shape[-1] == len(columns)
                    else output[..., columns]
                    for output in pair
                )
            )  # a file holds only these columns
    except GraphError as error:
        failures[cell.name] = str(error)
        return float("inf")
    return cell_error(errors, rounds)
