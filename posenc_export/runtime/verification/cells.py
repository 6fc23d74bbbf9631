"""The cells of the parity grid: which scenarios are compared with which expected outputs.

A graph that computes in float32 is compared with the expected outputs in every cell. If a graph
rounds activations, the call that reads all tokens (the full pass) is compared with the expected
outputs, and every other division of the tokens into calls with the full pass of the same graph,
which is closer.

Shapes: B batch, L tokens of a sequence, V numbers of an output.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Callable, Collection, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, Value
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import proof
from posenc_export.runtime.verification.cell import Cell
from posenc_export.runtime.verification.long_cells import WAYS, long_cells
from posenc_export.runtime.verification.long_sequence import runs
from posenc_export.runtime.verification.proof import Accuracy, AttributeCase, Expected
from posenc_export.runtime.verification.scenarios import (
    AT_LOAD,
    Case,
    Pairs,
    Scenario,
    admitted,
    grid,
    grid_of_last_outputs,
    grid_of_read_outs,
    grid_of_whole_calls,
)
from posenc_export.runtime.verification.transient_rows import WithTransientRows

FULL_PASS = "full pass"
GUEST_LENGTH = 8  # shortest sequence for which guest rows are tested: tokens that a guest may read
# The quick grid, on one batch whose rows start at the first and at the last position. It has each
# kind of call: prompts, tokens on a filled cache, chunks, steps, padding, rows of different
# lengths, outputs of last tokens, rewinds, forks, rows that come and go, coordinates, segments, and
# the second output.
QUICK = (
    "past middle, new 1",
    "chunks of 5",
    "left padding",
    "ragged rows",
    "last of ragged rows",
    "last of left padding",
    "rewind by row",
    "fork",
    "rows come and go",
    "at once",
    "padding",
    "coordinates",
    "segments",
    "readout",
)
REPEATED = (
    "chunks of 1",
)  # left out for large models, in which calls with one token and steps repeat its calls


@dataclass(frozen=True)
class Part:
    """Cells that one worker measures in sequence."""

    title: str  # name for progress messages
    cells: Callable[
        [Session], Iterator[Cell]
    ]  # yields the cells, after it has run those on which others depend
    long: bool = False  # whether the cells need more than long_sequence.SHORT tokens
    count: int = 1  # number of cells


def parts_of(
    manifest: Manifest, expected: Expected, accuracy: Accuracy, only: Collection[str]
) -> List[Part]:
    """Return all cells, the largest parts first, so that the workers finish at about the same
    time.
    """
    parts = []
    if expected.long is not None and not only:
        cells = functools.partial(long_cells, sequence=expected.long, rounds=accuracy.rounds)
        crossed = runs(expected.long.edges, expected.long.tokens.shape[1])
        count = 1 if accuracy.rounds or not manifest.states else 1 + len(WAYS) * len(crossed)
        parts.append(Part("the long sequence", cells, long=True, count=count))
    for case, among in _cases(manifest, expected, only):
        starts = [case.start] if isinstance(case.start, int) else case.start
        name = (
            f"batch {len(case.tokens)}, start{'s' * (len(starts) > 1)} "
            f"{', '.join(map(str, starts))}"
        )
        cells = functools.partial(
            _case_cells, name=name, manifest=manifest, case=case, rounds=accuracy.rounds, only=among
        )
        parts.append(
            Part(
                name,
                cells,
                count=len(_chosen(manifest, case, among))
                + 3 * len(_readouts(manifest, among))
                + accuracy.rounds,
            )
        )
    for name, (attribute_case, full) in expected.attribute_cases.items():
        if not only or name in only:
            parts.append(
                Part(
                    name,
                    functools.partial(
                        _attribute_cells,
                        name=name,
                        case=attribute_case,
                        full=full,
                        rounds=accuracy.rounds,
                    ),
                )
            )
    return parts


def _cases(
    manifest: Manifest, expected: Expected, only: Collection[str]
) -> Iterator[Tuple[Case, Collection[str]]]:
    """Yield cases with the names of their scenarios, empty for all. Few rows cost a large model
    as much time as many: its rows have different starts.
    """
    cases, large = list(expected.cases.values()), proof.is_large(manifest)
    if (large or only) and only != AT_LOAD and manifest.states:
        yield _beside_each_other(cases), only
    else:
        yield from [(case, only) for case in (cases[:1] if only else cases)]
    for case in [] if only else cases[:1] if large else cases:
        yield case.rows(min(proof.BATCHES)), QUICK if large and manifest.states else ()


def _beside_each_other(cases: Sequence[Case]) -> Case:
    """Return a case whose rows have the starts of all cases in turn. All cases have the same
    tokens.
    """
    if len(cases) == 1:
        return cases[0]
    rows = [(row, cases[row % len(cases)]) for row in range(len(cases[0].tokens))]
    full, other_full = (
        np.stack([getattr(case, name)[row] for row, case in rows])
        for name in ("full", "other_full")
    )
    return dataclasses.replace(
        cases[0],
        full=full,
        other_full=other_full,
        start=[int(np.max(case.start)) for _, case in rows],
    )


def _chosen(manifest: Manifest, case: Case, only: Collection[str]) -> Dict[str, Scenario]:
    return {
        name: scenario
        for name, scenario in _scenarios(manifest, case).items()
        if not only or name in only
    }


def _readouts(manifest: Manifest, only: Collection[str]) -> Sequence[Value]:
    return manifest.outputs[1:] if not only or "readout" in only else ()


def _case_cells(
    session: Session,
    name: str,
    manifest: Manifest,
    case: Case,
    rounds: bool,
    only: Collection[str] = (),
) -> Iterator[Cell]:
    """Yield the cells of a case. If activations are rounded, they are compared with the full
    pass of the same graph, which is compared with the reference.
    """
    against = ""
    if rounds:
        full_pass: List[np.ndarray] = []
        against = f"{name}: {FULL_PASS}"
        # A reference holds the outputs of the second ending only; before it they differ where
        # tokens attend to later ones, in a model without a cache.
        endings = (
            (case.tokens, case.full),
            (
                case.other,
                case.other_full if manifest.states else case.other_full[:, case.fork_at :],
            ),
        )
        yield Cell(
            against,
            functools.partial(
                _full_pass, endings=endings, arguments=case.beginning(), outputs=full_pass
            ),
        )
        if len(full_pass) < 2:
            return  # the graph failed
        case = dataclasses.replace(case, full=full_pass[0], other_full=full_pass[1])
    for cell, scenario in _chosen(manifest, case, only).items():
        yield Cell(f"{name}: {cell}", _on(scenario, case), against=against)
    for value in _readouts(manifest, only):
        for cell, scenario in grid_of_read_outs().items():
            yield Cell(f"{name}: {value.name}, {cell}", _on(scenario, case), 1, against)


def _on(scenario: Scenario, case: Case) -> Callable[[Session], Pairs]:
    return lambda session: scenario(session, case)


def _attribute_cells(
    session: Session, name: str, case: AttributeCase, full: np.ndarray, rounds: bool
) -> Iterator[Cell]:
    """Yield the cell of tokens with attributes; coordinates in chunks are compared as in
    _case_cells.
    """
    against = ""
    if rounds and name == "coordinates":
        full_pass: List[np.ndarray] = []
        against = f"{name}: {FULL_PASS}"
        yield Cell(
            against,
            functools.partial(
                _full_pass,
                endings=[(case.tokens, full)],
                arguments={"grid": case.attributes["grid"]},
                outputs=full_pass,
            ),
        )
        if not full_pass:
            return  # the graph failed
        full = full_pass[0]
    yield Cell(
        name, functools.partial(ATTRIBUTE_CELLS[name], case=case, full=full), against=against
    )


def _full_pass(
    session: Session,
    endings: Sequence[Tuple[np.ndarray, np.ndarray]],
    arguments: Dict[str, Any],
    outputs: List[np.ndarray],
) -> Pairs:
    """Read all tokens of each ending in one call, and append the outputs to `outputs`. Compares
    as many of the last tokens as there are expected outputs.
    """
    for tokens, expected in endings:
        session.reset()
        outputs.append(session.prefill(tokens, chunk=tokens.shape[1], **arguments))
        yield outputs[-1][:, -expected.shape[1] :], expected


def _scenarios(manifest: Manifest, case: Case) -> Dict[str, Scenario]:
    """Return the scenarios for an artefact, by name. Layout "rows" adds scenarios in which rows
    are admitted and retired.
    """
    length = case.tokens.shape[1]
    if not manifest.states:
        return grid_of_whole_calls(length)
    alone, large = (
        {**grid(length), **(grid_of_last_outputs() if manifest.input("logits_index") else {})},
        proof.is_large(manifest),
    )
    for name in REPEATED if large else ():
        del alone[name]
    if manifest.layout == "columns" or length < GUEST_LENGTH:
        return alone
    cells = {**alone, "rows come and go": admitted}
    if np.min(case.start) == 0 and len(case.tokens) > 1:
        beside = {name: scenario for name, scenario in alone.items() if name in QUICK or not large}
        cells |= {
            f"{name}, beside guests": functools.partial(_beside_guests, scenario=scenario)
            for name, scenario in beside.items()
        }
    return cells


def _beside_guests(session: Session, case: Case, scenario: Scenario) -> Pairs:
    """Run a scenario on a batch that guest rows join and leave."""
    guests, encoder = case.other[::-1].copy(), case.encoder and case.encoder[::-1]
    return scenario(WithTransientRows(session, guests, 1, encoder), case)  # type: ignore[arg-type]


def _coordinates(session: Session, case: AttributeCase, full: np.ndarray) -> Pairs:
    """Prefill in chunks with different coordinates for every token, then rewind and prefill the
    last tokens again with their coordinates.
    """
    grid = case.attributes["grid"]
    yield session.prefill(case.tokens, chunk=7, grid=grid), full
    for back in range(1, min(6, case.tokens.shape[1])) if session.manifest.states else ():
        session.rewind(back)
        yield session.prefill(case.tokens[:, -back:], grid=grid[:, :, -back:]), full[:, -back:]


def _segments(session: Session, case: AttributeCase, full: np.ndarray) -> Pairs:
    """Prefill tokens of different segments, with coordinates if the model has them, the first
    row with left padding.
    """
    attributes = case.attributes
    yield (
        session.prefill(
            case.tokens,
            attention_mask=case.mask,
            grid=attributes.get("grid"),
            token_types=attributes.get("token_types"),
        ),
        full,
    )


ATTRIBUTE_CELLS = {"coordinates": _coordinates, "segments": _segments}
