"""The cells of the parity grid: which scenarios are compared with which expected outputs, and those
of the long sequence, with calls of each kind on both sides of every edge, and a full cache.

Shapes: B batch, L tokens of a sequence, V numbers of an output.
"""

import functools
from typing import Callable, Dict, Iterator, List, Mapping, Optional

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import grid_inputs
from posenc_export.runtime.verification.grid_inputs import LongSequence, Run, calls, fill_chunk
from posenc_export.runtime.verification.proof import Expected
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

FILLED = "cache filled to its end"
RUN_UP = 8  # tokens before a run that the call across it also reads


def long_cells(manifest: Manifest, sequence: LongSequence) -> List[Cell]:
    """Return the cells of a sequence, which continue on one session that reads it once."""
    crossed = grid_inputs.runs(sequence.edges, sequence.tokens.shape[1])
    if not manifest.states:
        names = ", ".join(name for run in crossed for name in run.names)
        name = f"one call of {sequence.tokens.shape[1]:,} tokens, {names}"
        return [Cell(name, functools.partial(_whole, sequence=sequence))]
    ways = {
        f"{run.title}: {name}": functools.partial(way, sequence=sequence, run=run)
        for run in crossed
        for name, way in WAYS.items()
    }
    ways[FILLED] = functools.partial(_to_its_end, sequence=sequence)
    return [Cell(name, way, continues=index > 0) for index, (name, way) in enumerate(ways.items())]


def outputs_by(
    session: Session,
    manifest: Manifest,
    edges: Mapping[str, int],
    advance: Callable[[int], None],
) -> Optional[LongSequence]:
    """Return the long sequence with the outputs of a session, which may compute in another dtype
    than the artefact; None for a bidirectional model without an edge that it reaches. edges:
    indices of tokens, by name. advance: called with the number of tokens that are read.
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
    chunk: Optional[int] = None,
) -> np.ndarray:
    """Return the outputs of the last `count` tokens of a call. first: index of its first token, of
    which the first of a sequence comes with encoder outputs; chunk: as of Session.prefill.
    """
    rows = grid_inputs.encoder_rows(manifest, 1) if first == 0 else None
    encoder = rows and [row.astype(session.manifest.passed_dtype) for row in rows]
    outputs = session.prefill(tokens, encoder=encoder, chunk=chunk, logits_to_keep=max(count, 1))
    return outputs[:, outputs.shape[1] - count :]


def _read(session: Session, sequence: LongSequence, end: int, chunk: int) -> Pairs:
    """Read the tokens up to `end` behind those in the cache; compares all expected outputs."""
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
    """Read all further tokens but the last in chunks, the last as a step."""
    length = sequence.tokens.shape[1]
    yield from _seek(session, sequence, min(int(session.length.max(initial=0)), length - 1))
    yield from _read(session, sequence, max(length - 1, 1), fill_chunk(session.manifest))
    if length > 1:
        yield (session.step(sequence.tokens[:, -1]), sequence.within(length - 1, length)[1][:, 0])


def _whole(session: Session, sequence: LongSequence) -> Pairs:
    outputs = session.prefill(sequence.tokens)
    yield outputs[:, sequence.compared], sequence.outputs


WAYS: Dict[str, Callable[..., Pairs]] = {
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
        yield from _case_cells(manifest, name, case, level)
    for name, (attributes, full) in expected.attribute_cases.items():
        if level >= Level.QUICK:
            run = _coordinates if name == "coordinates" else _segments
            yield Cell(name, functools.partial(run, case=attributes, full=full))


def _case_cells(manifest: Manifest, name: str, case: Case, level: Level) -> Iterator[Cell]:
    for scenario in scenarios_of(manifest, case, level):
        yield Cell(f"{name}: {scenario.name}", functools.partial(scenario.run, case=case))
    for value in manifest.outputs[1:]:
        for scenario in OF_READOUTS:
            title, run = f"{name}: {value.name}, {scenario.name}", scenario.run
            if scenario.level <= level:
                yield Cell(title, functools.partial(run, case=case), 1)


def scenarios_of(manifest: Manifest, case: Case, level: Level = Level.WHOLE) -> List[Scenario]:
    """Return the scenarios for an artefact; layout "rows" adds those that admit and retire rows."""
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
