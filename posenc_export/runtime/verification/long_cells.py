"""Cells of the long sequence: calls of each kind on both sides of every edge, and a full cache."""

import functools
from typing import Callable, Dict, Iterable, List, Mapping, Optional

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import grid_inputs
from posenc_export.runtime.verification.case import Cell, Pairs
from posenc_export.runtime.verification.grid_inputs import LongSequence, Run, calls, fill_chunk

FILLED = "cache filled to its end"
RUN_UP = 8  # tokens before a run that the call across it also reads


def long_cells(
    manifest: Manifest, sequence: LongSequence, rounds: bool, title: str = ""
) -> List[Cell]:
    """Return the cells of a sequence. They continue on one session, which reads the sequence once.
    title: begins their names. If the graph rounds, one cell has all calls: the root mean square of
    few errors varies.
    """
    crossed = grid_inputs.runs(sequence.edges, sequence.tokens.shape[1])
    if not manifest.states:
        names = ", ".join(name for run in crossed for name in run.names)
        name = f"one call of {sequence.tokens.shape[1]:,} tokens, {names}"
        return [Cell(title + name, functools.partial(_whole, sequence=sequence))]
    ways = {
        f"{title}{run.title}: {name}": functools.partial(way, sequence=sequence, run=run)
        for run in crossed
        for name, way in WAYS.items()
    }
    ways[title + FILLED] = functools.partial(_to_its_end, sequence=sequence)
    if rounds:
        return [Cell(title + FILLED, lambda session: _one_after_another(session, ways.values()))]
    return [Cell(name, way, continues=index > 0) for index, (name, way) in enumerate(ways.items())]


def _one_after_another(session: Session, ways: Iterable[Callable[[Session], Pairs]]) -> Pairs:
    for way in ways:
        yield from way(session)


def outputs_by(
    session: Session,
    manifest: Manifest,
    edges: Mapping[str, int],
    advance: Callable[[int], None] = lambda read: None,
    length: int = 0,
) -> Optional[LongSequence]:
    """Return the long sequence with the outputs of a session, which may compute in another dtype
    than the artefact; None for a bidirectional model without an edge that it reaches. edges:
    indices of tokens, by name. advance: called with the number of tokens that are read. length: 0
    for a whole model's.
    """
    length = length or grid_inputs.length_for(manifest, edges)
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
        encoder, keep = _encoder(session, manifest, first), max(count, 1)
        outputs = session.prefill(read[:, first:end], encoder=encoder, logits_to_keep=keep)
        parts.append(outputs[:, outputs.shape[1] - count :])
        advance(end)
    return LongSequence(tokens, compared, np.concatenate(parts, axis=1), edges)


def _encoder(session: Session, manifest: Manifest, first: int) -> Optional[List[np.ndarray]]:
    """Return encoder outputs for the first call of a sequence; None for others."""
    rows = grid_inputs.encoder_rows(manifest, 1) if first == 0 else None
    return rows and [row.astype(session.manifest.passed_dtype) for row in rows]


def _read(session: Session, sequence: LongSequence, end: int, chunk: int) -> Pairs:
    """Read the tokens up to `end` behind those in the cache; compares all expected outputs."""
    first = int(session.length.max(initial=0))
    for begin, after, count in calls(sequence.compared, first, end, chunk):
        encoder, keep = _encoder(session, session.manifest, begin), max(count, 1)
        tokens = sequence.tokens[:, begin:after]
        outputs = session.prefill(tokens, encoder=encoder, logits_to_keep=keep)
        if count:
            yield outputs[:, outputs.shape[1] - count :], sequence.within(after - count, after)[1]


def _seek(session: Session, sequence: LongSequence, length: int) -> Pairs:
    cached = int(session.length.max(initial=0))
    if cached > length:
        session.rewind(cached - length)
    yield from _read(session, sequence, length, fill_chunk(session.manifest))


def _across(session: Session, sequence: LongSequence, run: Run) -> Pairs:
    """Read the tokens before a run, then the run and a few tokens before it in one call."""
    yield from _seek(session, sequence, max(0, run.first - RUN_UP))
    begin, count = int(session.length.max(initial=0)), run.end - run.first
    encoder, tokens = (
        _encoder(session, session.manifest, begin),
        sequence.tokens[:, begin : run.end],
    )
    chunk = run.end - begin
    outputs = session.prefill(tokens, chunk=chunk, logits_to_keep=count, encoder=encoder)
    yield outputs[:, outputs.shape[1] - count :], sequence.within(run.first, run.end)[1]


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
