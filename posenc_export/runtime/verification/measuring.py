"""The cells of the parity grid: scenarios with their expected outputs, and cells of the long
sequence, with calls of each kind on both sides of every edge, and a full cache.

They measure the errors of a session on an artefact, or on its float32 form if it rounds. A load
runs a few of them. Shapes: B batch, L tokens of a sequence, V numbers of an output.
"""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Callable, Iterator, Mapping

import numpy as np

from posenc_export.runtime.artefact.certificate import (
    EXPORTED,
    FORM,
    bound_of,
    format_cell,
    worst_cell,
)
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import grid_inputs, proof
from posenc_export.runtime.verification.grid_inputs import LongSequence, Run, calls, fill_chunk
from posenc_export.runtime.verification.proof import Accuracy, Expected, Measured
from posenc_export.runtime.verification.scenarios import (
    OF_LAST_OUTPUTS,
    OF_READOUTS,
    OF_ROWS,
    AttributeCase,
    Case,
    Cell,
    Level,
    Pairs,
    Scenario,
    of_caches,
    of_whole_calls,
    split,
)
from posenc_export.shared.numerics import Errors, cell_error
from posenc_export.shared.progress import Progress, Steps, silent

FILLED = "cache filled to its end"
RUN_UP = 8  # tokens before a run that the call across it also reads


def long_cells(manifest: Manifest, sequence: LongSequence) -> list[Cell]:
    """Return the cells of a sequence. They share one session, which reads the sequence once."""
    crossed = grid_inputs.runs(sequence.edges, sequence.tokens.shape[1])
    if not manifest.states:
        names = ", ".join(name for run in crossed for name in run.names)
        name = f"one call of {sequence.tokens.shape[1]:,} tokens, {names}"
        return [Cell(name, functools.partial(_whole, sequence=sequence))]
    ways = {
        f"tokens {run.first:,} to {run.end - 1:,}, {', '.join(run.names)}: {name}": (
            functools.partial(way, sequence=sequence, run=run)
        )
        for run in crossed
        for name, way in WAYS.items()
    }
    ways[FILLED] = functools.partial(_to_its_end, sequence=sequence)
    return [Cell(name, way, continues=index > 0) for index, (name, way) in enumerate(ways.items())]


def outputs_by(
    session: Session, manifest: Manifest, edges: Mapping[str, int], advance: Callable[[int], None]
) -> LongSequence | None:
    """Return the long sequence with the outputs of a session, which may compute in another dtype
    than the artefact; None for a bidirectional model without an edge within its length. edges:
    indices of tokens, by name. advance: called with the number of tokens that were read.
    """
    length = grid_inputs.length_for(manifest, edges)
    if not length:
        return None
    tokens = grid_inputs.tokens_of(manifest, length)
    read = tokens if tokens.dtype == np.int64 else tokens.astype(session.manifest.passed_dtype)
    session.reset()
    if not manifest.states:
        compared = np.arange(length)
        outputs = session.prefill(read)
        advance(length)
        return LongSequence(tokens, compared, outputs, edges)
    compared, parts = grid_inputs.compared_of(manifest, edges, length), []
    for first, end, count in calls(compared, 0, length, fill_chunk(manifest)):
        parts.append(_fed(session, manifest, read[:, first:end], first, count))
        advance(end)
    return LongSequence(tokens, compared, np.concatenate(parts, axis=1), edges)


def _fed(
    session: Session,
    manifest: Manifest,
    tokens: np.ndarray,
    first: int,
    count: int,
    chunk: int | None = None,
) -> np.ndarray:
    """Feed tokens, and return the outputs of the last `count`. first: index of the first token; 0
    feeds encoder outputs, too. chunk: as for Session.prefill.
    """
    rows = grid_inputs.encoder_rows(manifest, 1) if first == 0 else None
    encoder = rows and [row.astype(session.manifest.passed_dtype) for row in rows]
    outputs = session.prefill(tokens, encoder=encoder, chunk=chunk, logits_to_keep=max(count, 1))
    return outputs[:, outputs.shape[1] - count :]


def _read(session: Session, sequence: LongSequence, end: int, chunk: int) -> Pairs:
    """Read the tokens after those in the cache up to `end`, and yield all expected outputs."""
    first = int(session.length.max(initial=0))
    for begin, after, count in calls(sequence.compared, first, end, chunk):
        outputs = _fed(session, session.manifest, sequence.tokens[:, begin:after], begin, count)
        if count:
            yield outputs, sequence.within(after - count, after)[1]


def _seek(session: Session, sequence: LongSequence, length: int) -> Pairs:
    cached = int(session.length.max(initial=0))
    if cached > length:
        session.rewind(cached - length)
    yield from _read(session, sequence, length, fill_chunk(session.manifest))


def _across(session: Session, sequence: LongSequence, run: Run) -> Pairs:
    """Read the tokens before a run, then the run and a few tokens before it in one call."""
    yield from _seek(session, sequence, max(0, run.first - RUN_UP))
    begin = int(session.length.max(initial=0))
    tokens, count = sequence.tokens[:, begin : run.end], run.end - run.first
    outputs = _fed(session, session.manifest, tokens, begin, count, chunk=run.end - begin)
    yield outputs, sequence.within(run.first, run.end)[1]


def _in_steps(session: Session, sequence: LongSequence, run: Run) -> Pairs:
    yield from _seek(session, sequence, max(run.first, 1))
    for index in range(int(session.length[0]), run.end):
        yield session.step(sequence.tokens[:, index]), sequence.within(index, index + 1)[1][:, 0]


def _from_it_on(session: Session, sequence: LongSequence, run: Run) -> Pairs:
    yield from _seek(session, sequence, run.edge)
    outputs = session.prefill(sequence.tokens[:, run.edge : run.end], chunk=run.end - run.edge)
    yield outputs, sequence.within(run.edge, run.end)[1]


def _to_its_end(session: Session, sequence: LongSequence) -> Pairs:
    """Read the remaining tokens in chunks, and the last one as a step."""
    length = sequence.tokens.shape[1]
    yield from _seek(session, sequence, min(int(session.length.max(initial=0)), length - 1))
    yield from _read(session, sequence, max(length - 1, 1), fill_chunk(session.manifest))
    if length > 1:
        yield (session.step(sequence.tokens[:, -1]), sequence.within(length - 1, length)[1][:, 0])


def _whole(session: Session, sequence: LongSequence) -> Pairs:
    outputs = session.prefill(sequence.tokens)
    yield outputs[:, sequence.compared], sequence.outputs


WAYS: dict[str, Callable[..., Pairs]] = {
    "in a call across it": _across,
    "in steps": _in_steps,
    "in a call from it on": _from_it_on,
}


def cells_of(manifest: Manifest, expected: Expected, level: Level) -> Iterator[Cell]:
    """Yield all cells of a grid."""
    if expected.long is not None and level is Level.WHOLE:
        yield from long_cells(manifest, expected.long)
    for rows in sorted(grid_inputs.BATCHES, reverse=True)[: 2 if level is Level.WHOLE else 1]:
        case = expected.case.rows(rows)
        several = len({*case.starts}) > 1
        starts = ", ".join(map(str, case.starts)) if several else f"{case.starts[0]}"
        name = f"batch {rows}, start{'s' if several else ''} {starts}"
        for scenario in scenarios_of(manifest, case, level):
            yield Cell(f"{name}: {scenario.name}", functools.partial(scenario.run, case=case))
        for value, scenario in itertools.product(manifest.outputs[1:], OF_READOUTS):
            if scenario.level <= level:
                title = f"{name}: {value.name}, {scenario.name}"
                yield Cell(title, functools.partial(scenario.run, case=case), 1)
    for name, (attributes, full) in expected.attribute_cases.items():
        if level >= Level.QUICK:
            run = _coordinates if name == "coordinates" else _segments
            yield Cell(name, functools.partial(run, case=attributes, full=full))


def scenarios_of(manifest: Manifest, case: Case, level: Level = Level.WHOLE) -> list[Scenario]:
    """Return the scenarios for an artefact. Only layout "rows" allows to admit and retire rows."""
    length = case.tokens.shape[1]
    scenarios = of_whole_calls(length)
    if manifest.states:
        scenarios = [Scenario("at once", split(0, length)), *of_caches(length)]
    if manifest.states and manifest.input("logits_index"):
        scenarios += OF_LAST_OUTPUTS
    if manifest.states and manifest.layout != "columns":
        scenarios.append(OF_ROWS)
    return [scenario for scenario in scenarios if scenario.level <= level]


def _coordinates(session: Session, case: AttributeCase, full: np.ndarray) -> Pairs:
    """Prefill in chunks with other coordinates for every token, rewind, and repeat the last."""
    grid = case.attributes["grid"]
    yield session.prefill(case.tokens, chunk=7, grid=grid), full
    for back in range(1, min(6, case.tokens.shape[1])) if session.manifest.states else ():
        session.rewind(back)
        yield session.prefill(case.tokens[:, -back:], grid=grid[:, :, -back:]), full[:, -back:]


def _segments(session: Session, case: AttributeCase, full: np.ndarray) -> Pairs:
    yield session.prefill(case.tokens, attention_mask=case.mask, **case.attributes), full


def measured(
    model: Model,
    folder: Path,
    expected: Expected,
    accuracy: Accuracy,
    progress: Progress,
    threads: int | None = 1,
    quick: bool = False,
) -> Measured:
    """Measure every cell of an artefact, and of its float32 form if it rounds. model: the loaded
    artefact, with `threads` per operator. quick: run one scenario for each kind of call. Raise
    ValueError if the form cannot be loaded, ModuleNotFoundError without ONNX Runtime.
    """
    level = Level.QUICK if quick else Level.WHOLE
    if not accuracy.float32:
        return measure(_filled(model), expected, accuracy, progress, level=level)
    from posenc_export.runtime.verification.float32_form import load_form

    form, exact = load_form(folder, model.manifest, threads), Accuracy(accuracy.float32)
    progress(f"{model.manifest.target}: verifying the float32 form")
    of_form = measure(_filled(form), expected, exact, progress, level=level).named(FORM)
    del form  # and its memory
    progress(f"{model.manifest.target}: verifying as exported")
    limit = proof.as_exported(accuracy, model)
    level = level if limit.rounds else Level.QUICK
    exported = measure(_filled(model), expected, limit, progress, level=level)
    return of_form.joined(exported.named(EXPORTED))


def _filled(model: Model) -> Session:
    """Open a session with room for the long sequence."""
    return model.session(capacity=grid_inputs.fill_length(model.manifest))


def check_outputs(model: Model, folder: Path) -> None:
    """Raise ValueError unless the model that was loaded from `folder` gives the outputs of its
    reference within the tolerance, in the cells of Level.LOAD, or if the reference cannot be read.
    An artefact without a reference is not checked.
    """
    manifest = model.manifest
    if manifest.reference is None:
        return
    accuracy = replace(proof.default_accuracy(manifest.reference), float32=0.0)
    capacity = min(manifest.max_positions, grid_inputs.SHORT)
    session = model.session(batch=max(grid_inputs.BATCHES), capacity=capacity)
    expected = proof.read(manifest, folder)
    result = measure(session, expected, accuracy, silent, until_failure=True, level=Level.LOAD)
    proven = proof.certificate(session, accuracy, result, quick=True)
    if not proven["passed"]:
        cell = worst_cell(proven)
        got = proven["failures"].get(cell) or f"an error of {format_cell(proven, cell)} in '{cell}'"
        bound = f"within {bound_of(proven, cell):.1e} of the reference of the artefact"
        rule = f"expected outputs of provider {model.provider} {bound}"
        raise ValueError(f"runtime: {rule}, got {got}; give provider cpu")


def measure(
    session: Session,
    expected: Expected,
    accuracy: Accuracy,
    progress: Progress,
    until_failure: bool = False,
    level: Level = Level.WHOLE,
) -> Measured:
    """Measure every cell of a grid. progress: called with one line of text at each stage.
    until_failure: stop at the first cell that exceeds its tolerance.
    """
    title = f"{session.manifest.target}: verifying"
    progress(title)
    cells, result = list(cells_of(session.manifest, expected, level)), Measured()
    steps = Steps(progress, title, len(cells), "cells")
    for cell in cells:
        columns = (expected.columns, expected.readout_columns)[cell.of]
        error = _error(session, cell, columns, result.failures, accuracy.rounds)
        result.cells[cell.name] = proof.rounded_up(error)
        steps.advance()
        if until_failure and result.exceeds(accuracy.tolerance):
            break
    if level is Level.WHOLE and expected.long is not None:
        result.unreached = expected.long.unreached()
    return result


def _error(
    session: Session, cell: Cell, columns: np.ndarray, failures: dict[str, str], rounds: bool
) -> float:
    """Run a cell and return its error, which is infinity if the graph fails; `failures` gets the
    reason. columns: indices of the expected numbers of an output.
    """
    if not cell.continues:
        session.reset()
    errors = Errors()
    try:
        for pair in cell.pairs(session):
            actual, expected = (
                output
                if output.shape[-1] == len(columns)  # from a file, which only has these
                else output[..., columns]
                for output in pair
            )
            errors.add(actual, expected)
    except GraphError as error:
        failures[cell.name] = str(error)
        return float("inf")
    return cell_error(errors, rounds)
