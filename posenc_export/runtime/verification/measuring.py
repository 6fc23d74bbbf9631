"""Measure the errors of an artefact: run every cell of the parity grid on sessions of one loaded graph and compare with the expected outputs.

A graph that computes in float32 is compared with the expected outputs in every cell. If a graph rounds activations, the call that reads all tokens (the full
pass) is compared with the expected outputs, and every other division of the tokens into calls with the full pass of the same graph, which is closer.

Shapes: B batch, L tokens of a sequence, V numbers of an output.
"""

import dataclasses
import functools
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import proof, reference
from posenc_export.runtime.verification.proof import Accuracy, AttributeCase, Expected
from posenc_export.runtime.verification.scenarios import Case, Pairs, Scenario, admitted, grid, grid_of_last_outputs, grid_of_read_outs, grid_of_whole_calls
from posenc_export.runtime.verification.transient_rows import WithTransientRows
from posenc_export.shared.numerics import Errors, cell_error, division_tolerance, readout_tolerance

FULL_PASS = "full pass"
KEPT = 1 << 22  # most output values kept of a filled cache (16 MiB); with a large vocabulary these are the last tokens only
GUEST_LENGTH = 8  # shortest sequence for which guest rows are tested: tokens that a guest may read
THREADED = 64 << 20  # bytes of weights above which threads are used: one core reads them in 5 ms, Python's thread switch interval
MOST_WORKERS = 4  # each worker needs its own caches and activations


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    name: str  # in the certificate
    pairs: Callable[[Session], Pairs]  # drives an empty session and yields pairs of actual and expected outputs
    of: int = 0  # index of the compared output, in Manifest.outputs
    against: str = ""  # name of the cell whose actual outputs are the expected outputs of this one, or whose error bounds that of a readout; empty for none


@dataclass(frozen=True)
class Part:
    """Cells that one worker measures in sequence."""

    title: str  # name for progress messages
    cells: Callable[[Session], Iterator[Cell]]  # yields the cells, after it has run those on which others depend
    long: bool = False  # whether the cells need more than proof.SHORT tokens


@dataclass
class Measured:
    """Errors of an artefact on the grid, by name of a cell."""

    cells: Dict[str, float] = field(default_factory=dict)  # numerics.cell_error
    bounds: Dict[str, float] = field(default_factory=dict)  # tolerance of the cells whose tolerance is not that of the artefact
    failures: Dict[str, str] = field(default_factory=dict)  # message of the graph that failed in the cell

    def exceeds(self, tolerance: float) -> bool:
        """Whether a cell exceeds its tolerance, which is `tolerance` unless `bounds` has another."""
        return any(not error <= self.bounds.get(name, tolerance) for name, error in self.cells.items())


def sessions(model: Model, threads: Optional[int]) -> List[Session]:
    """Open the sessions for `measure`: one with room for the full cache and, for large weights, smaller ones for worker threads.

    Args:
        threads: threads per operator that the model was loaded with.
    """
    whole = model.session(capacity=proof.fill_length(model.manifest))
    large = sum(file.bytes for file in model.manifest.files.values()) >= THREADED
    if not large or threads != 1 or model.provider != "cpu" or graph_file(model.manifest) != "model.onnx":
        return [whole]
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    return [whole, *(model.session(capacity=min(model.manifest.max_positions, proof.SHORT)) for _ in range(workers))]


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
        session: runs the cell that fills a cache and, if there are no workers, all other cells.
        accuracy: whether the graph rounds activations, and its tolerance.
        progress: called with one line of text at each stage, in the calling thread.
        workers: further sessions on the same graph, with a capacity of at least proof.SHORT tokens; each is used by one thread at a time.
        until_failure: stop at the first cell that exceeds its tolerance.
        only: names of the scenarios to run, on the larger batch from the first start; empty for the whole grid.
    """
    progress(f"{session.manifest.target}: verifying")
    parts = _parts(session.manifest, expected, accuracy, only)
    total = Measured()
    idle: "queue.SimpleQueue[Session]" = queue.SimpleQueue()
    for worker in workers or [session]:
        idle.put(worker)

    def measured(part: Part) -> Measured:
        worker = idle.get()
        try:
            return _measured(session if part.long else worker, part, (expected.columns, expected.readout_columns), accuracy, until_failure)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(len(workers)) if workers else None
    try:
        for part, errors in zip(parts, pool.map(measured, parts) if pool else map(measured, parts), strict=True):
            total.cells |= errors.cells
            total.bounds |= errors.bounds
            total.failures |= errors.failures
            progress(f"{session.manifest.target}: verified {part.title}")
            if until_failure and errors.exceeds(accuracy.tolerance):
                break
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    return total


def _measured(session: Session, part: Part, columns: Sequence[np.ndarray], accuracy: Accuracy, until_failure: bool) -> Measured:
    result = Measured()
    for cell in part.cells(session):
        error = _error(session, cell, columns[cell.of], result.failures, accuracy.rounds)
        result.cells[cell.name] = proof.rounded_up(error)
        if cell.of and accuracy.rounds:
            result.bounds[cell.name] = readout_tolerance(accuracy.noise, result.cells[cell.against])
        elif cell.against:
            result.bounds[cell.name] = division_tolerance(accuracy.noise, result.cells[cell.against], accuracy.tolerance)
        if until_failure and result.exceeds(accuracy.tolerance):
            break
    return result


def _error(session: Session, cell: Cell, columns: np.ndarray, failures: Dict[str, str], rounds: bool) -> float:
    """Run a cell on an empty session and return its error; infinity if the graph fails, whose message is then added to `failures`."""
    session.reset()
    errors = Errors()
    try:
        for pair in cell.pairs(session):
            errors.add(*(output if output.shape[-1] == len(columns) else output[..., columns] for output in pair))  # a file holds only these columns
    except GraphError as error:
        failures[cell.name] = str(error)
        return float("inf")
    return cell_error(errors, rounds)


def _parts(manifest: Manifest, expected: Expected, accuracy: Accuracy, only: Collection[str]) -> List[Part]:
    """Return all cells, the largest parts first, so that the workers finish at about the same time."""
    parts = []
    if only:
        start, largest = next(iter(expected.cases.items()))
        name = f"batch {len(largest.tokens)}, start {start}"
        return [Part(name, functools.partial(_case_cells, name=name, manifest=manifest, case=largest, rounds=accuracy.rounds, only=only))]
    if expected.filled is not None:
        tokens, last = expected.filled
        filled = Cell("cache filled to its end", functools.partial(_filled, tokens=tokens, last=last))
        parts.append(Part("a full cache", lambda _: iter([filled]), long=True))
    for batch in sorted(proof.BATCHES, reverse=True):
        for start, largest in expected.cases.items():
            if start and batch == min(proof.BATCHES) and proof.is_large(manifest):
                continue
            name = f"batch {batch}, start {start}"
            parts.append(Part(name, functools.partial(_case_cells, name=name, manifest=manifest, case=largest.rows(batch), rounds=accuracy.rounds)))
    for name, (attribute_case, full) in expected.attribute_cases.items():
        parts.append(Part(name, functools.partial(_attribute_cells, name=name, case=attribute_case, full=full, rounds=accuracy.rounds)))
    return parts


def _case_cells(session: Session, name: str, manifest: Manifest, case: Case, rounds: bool, only: Collection[str] = ()) -> Iterator[Cell]:
    """Yield the cells of a case. If activations are rounded, they are compared with the full pass of the same graph, which is compared with the reference."""
    against = ""
    if rounds:
        full_pass: List[np.ndarray] = []
        against = f"{name}: {FULL_PASS}"
        # A reference holds the outputs of the second ending only; before it they differ where tokens attend to later ones, in a model without a cache.
        endings = ((case.tokens, case.full), (case.other, case.other_full if manifest.states else case.other_full[:, case.fork_at :]))
        yield Cell(against, functools.partial(_full_pass, endings=endings, arguments=case.beginning(), outputs=full_pass))
        if len(full_pass) < 2:
            return  # the graph failed
        case = dataclasses.replace(case, full=full_pass[0], other_full=full_pass[1])
    for cell, scenario in _scenarios(manifest, case).items():
        if not only or cell in only:
            yield Cell(f"{name}: {cell}", _on(scenario, case), against=against)
    for value in () if only else manifest.outputs[1:]:
        for cell, scenario in grid_of_read_outs().items():
            yield Cell(f"{name}: {value.name}, {cell}", _on(scenario, case), 1, against)


def _on(scenario: Scenario, case: Case) -> Callable[[Session], Pairs]:
    return lambda session: scenario(session, case)


def _attribute_cells(session: Session, name: str, case: AttributeCase, full: np.ndarray, rounds: bool) -> Iterator[Cell]:
    """Yield the cell of tokens with attributes; coordinates in chunks are compared as in _case_cells."""
    against = ""
    if rounds and name == "coordinates":
        full_pass: List[np.ndarray] = []
        against = f"{name}: {FULL_PASS}"
        yield Cell(against, functools.partial(_full_pass, endings=[(case.tokens, full)], arguments={"grid": case.attributes["grid"]}, outputs=full_pass))
        if not full_pass:
            return  # the graph failed
        full = full_pass[0]
    yield Cell(name, functools.partial(ATTRIBUTE_CELLS[name], case=case, full=full), against=against)


def _full_pass(session: Session, endings: Sequence[Tuple[np.ndarray, np.ndarray]], arguments: Dict[str, Any], outputs: List[np.ndarray]) -> Pairs:
    """Read all tokens of each ending in one call, and append the outputs to `outputs`. Compares as many of the last tokens as there are expected outputs."""
    for tokens, expected in endings:
        session.reset()
        outputs.append(session.prefill(tokens, chunk=tokens.shape[1], **arguments))
        yield outputs[-1][:, -expected.shape[1] :], expected


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
        cells |= {f"{name}, beside guests": functools.partial(_beside_guests, scenario=scenario) for name, scenario in alone.items()}
    return cells


def _beside_guests(session: Session, case: Case, scenario: Scenario) -> Pairs:
    """Run a scenario on a batch that guest rows join and leave."""
    return scenario(WithTransientRows(session, case.other[::-1].copy(), 1, case.encoder and case.encoder[::-1]), case)  # type: ignore[arg-type]


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


def filled_by(session: Session, manifest: Manifest) -> Tuple[np.ndarray, np.ndarray]:
    """Return the tokens that fill a cache, and the last outputs that a session gives for them, as Expected holds them.

    Args:
        session: may compute in another dtype than the artefact; it gets the artefact's inputs in its own.
        manifest: of the artefact.
    """
    tokens, parts = proof.fill_inputs(manifest), []
    length, chunk, dtype = tokens.shape[1], proof.fill_chunk(manifest), session.manifest.passed_dtype
    read = tokens if tokens.dtype == np.int64 else tokens.astype(dtype)
    sources = proof.encoder_rows(manifest, 1)
    encoder = None if sources is None else [row.astype(dtype) for row in sources]
    compared = max(0, length - max(KEPT // int(manifest.outputs[0].axes[-1]), reference.LAST))  # first token whose output is kept
    session.reset()
    for first in range(0, length, chunk):
        end = min(first + chunk, length)
        count = max(0, end - max(compared, first))
        outputs = session.prefill(read[:, first:end], encoder=encoder if first == 0 else None, logits_to_keep=max(count, 1))
        parts.append(outputs[:, outputs.shape[1] - count :])
    return tokens, np.concatenate(parts, axis=1)


def _filled(session: Session, tokens: np.ndarray, last: np.ndarray) -> Pairs:
    """Fill the cache to its end: all tokens but the last in chunks, the last as a step. Yields only the outputs for which `last` has expected values."""
    length, compared, chunk = tokens.shape[1], tokens.shape[1] - last.shape[1], proof.fill_chunk(session.manifest)
    for first in range(0, max(length - 1, 1), chunk):
        end = min(first + chunk, max(length - 1, 1))
        begin, encoder = max(compared, first), proof.encoder_rows(session.manifest, 1) if first == 0 else None
        outputs = session.prefill(tokens[:, first:end], encoder=encoder, logits_to_keep=max(end - begin, 1))
        if begin < end:
            yield outputs, last[:, begin - compared : end - compared]
    if length > 1:
        yield session.step(tokens[:, -1]), last[:, -1]
