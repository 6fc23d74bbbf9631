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
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import grid_inputs, row_scenarios
from posenc_export.runtime.verification.case import (
    AttributeCase,
    Case,
    Cell,
    Level,
    Pairs,
    Scenario,
)
from posenc_export.runtime.verification.long_cells import long_cells
from posenc_export.runtime.verification.proof import Expected
from posenc_export.runtime.verification.scenarios import (
    OF_LAST_OUTPUTS,
    OF_READOUTS,
    OF_ROWS,
    of_caches,
    of_whole_calls,
)

FULL_PASS = "full pass"
GUEST_LENGTH = 8  # shortest sequence for which guest rows are tested: tokens that a guest may read
Ending = Tuple[np.ndarray, np.ndarray]  # tokens, and expected outputs of the last of them


@dataclass(frozen=True)
class Part:
    """Cells that one worker measures in sequence."""

    title: str  # name for progress messages
    # Returns the cells. They keep the outputs of the full pass that others are compared with.
    cells: Callable[[], List[Cell]]
    long: bool = False  # whether the cells need more than grid_inputs.SHORT tokens


def parts_of(manifest: Manifest, expected: Expected, rounds: bool, level: Level) -> List[Part]:
    """Return all cells of a grid, the largest parts first, so that the workers finish at about the
    same time. rounds: whether the graph rounds activations.
    """
    parts = []
    if expected.long is not None and level is Level.WHOLE:
        cells = functools.partial(long_cells, manifest, expected.long, rounds)
        parts.append(Part("the long sequence", cells, long=True))
    for case, of_case in _cases(manifest, expected, level):
        starts = [case.start] if isinstance(case.start, int) else case.start
        plural = "s" if len(starts) > 1 else ""
        name = f"batch {len(case.tokens)}, start{plural} {', '.join(map(str, starts))}"
        cells = functools.partial(_case_cells, manifest, name, case, rounds, of_case)
        parts.append(Part(name, cells))
    for name, (attributes, full) in expected.attribute_cases.items():
        if level >= Level.QUICK:
            cells = functools.partial(_attribute_cells, name, attributes, full, rounds)
            parts.append(Part(name, cells))
    return parts


def _cases(manifest: Manifest, expected: Expected, level: Level) -> Iterator[Tuple[Case, Level]]:
    """Yield cases with their levels. Rows of a large model's case have different starts."""
    cases, cached = list(expected.cases.values()), bool(manifest.states)
    if level <= Level.QUICK:
        mixed = cached and level is Level.QUICK
        yield _beside_each_other(cases) if mixed else cases[0], level
        return
    large = grid_inputs.is_large(manifest)
    level, together = Level.LARGE if large else level, large and cached
    for case in [_beside_each_other(cases)] if together else cases:
        yield case, level
    for case in cases[:1] if large else cases:
        yield case.rows(min(grid_inputs.BATCHES)), Level.QUICK if together else level


def _beside_each_other(cases: Sequence[Case]) -> Case:
    """Return a case whose rows have the starts of all cases, which have the same tokens."""
    if len(cases) == 1:
        return cases[0]
    rows = [(row, cases[row % len(cases)]) for row in range(len(cases[0].tokens))]
    return dataclasses.replace(
        cases[0],
        full=np.stack([case.full[row] for row, case in rows]),
        other_full=np.stack([case.other_full[row] for row, case in rows]),
        start=[int(np.max(case.start)) for _, case in rows],
    )


def _case_cells(
    manifest: Manifest, name: str, case: Case, rounds: bool, level: Level
) -> List[Cell]:
    """Return the cells of a case, compared with the reference, or the full pass if it rounds."""
    cells, against, outputs = [], "", [case.full, case.other_full]
    if rounds:
        # A reference holds the outputs of the second ending only; before it they differ where
        # tokens attend to later ones, in a model without a cache.
        other = case.other_full if manifest.states else case.other_full[:, case.fork_at :]
        endings = ((case.tokens, case.full), (case.other, other))
        cell, outputs = _full_pass(name, endings, case.beginning())
        cells, against = [cell], cell.name

    def run_by(scenario: Scenario) -> Callable[[Session], Pairs]:
        def pairs(session: Session) -> Pairs:
            full, other_full = outputs
            known = dataclasses.replace(case, full=full, other_full=other_full)
            return scenario.run(session, known)

        return pairs

    for scenario in scenarios_of(manifest, case, level):
        cells.append(Cell(f"{name}: {scenario.name}", run_by(scenario), against=against))
    for value in manifest.outputs[1:]:
        for scenario in OF_READOUTS:
            if scenario.level <= level:
                title = f"{name}: {value.name}, {scenario.name}"
                cells.append(Cell(title, run_by(scenario), 1, against))
    return cells


def scenarios_of(manifest: Manifest, case: Case, level: Level = Level.WHOLE) -> List[Scenario]:
    """Return the scenarios for an artefact; layout "rows" adds those that admit and retire rows."""
    length = case.tokens.shape[1]
    scenarios = of_caches(length) if manifest.states else of_whole_calls(length)
    if manifest.states and manifest.input("logits_index"):
        scenarios += OF_LAST_OUTPUTS
    if manifest.states and manifest.layout != "columns" and length >= GUEST_LENGTH:
        alone = list(scenarios)
        scenarios.append(OF_ROWS)
        if np.min(case.start) == 0 and len(case.tokens) > 1:
            scenarios += map(_beside_guests, alone)
    return [scenario for scenario in scenarios if scenario.level <= level]


def _beside_guests(scenario: Scenario) -> Scenario:
    def run(session: Session, case: Case) -> Pairs:
        guests, encoder = case.other[::-1].copy(), case.encoder and case.encoder[::-1]
        beside = row_scenarios.WithTransientRows(session, guests, encoder)
        return scenario.run(beside, case)

    level = Level.LARGE if scenario.level <= Level.QUICK else Level.WHOLE
    return Scenario(f"{scenario.name}, beside guests", run, level)


def _attribute_cells(name: str, case: AttributeCase, full: np.ndarray, rounds: bool) -> List[Cell]:
    """Return the cell of tokens with attributes, compared as in _case_cells."""
    cells, against, outputs = [], "", [full]
    if rounds and name == "coordinates":
        cell, outputs = _full_pass(name, [(case.tokens, full)], case.attributes)
        cells, against = [cell], cell.name
    run = _coordinates if name == "coordinates" else _segments
    return [*cells, Cell(name, lambda session: run(session, case, outputs[0]), against=against)]


def _full_pass(
    name: str, endings: Sequence[Ending], arguments: Dict[str, Any]
) -> Tuple[Cell, List[np.ndarray]]:
    """Return the cell of one call for each ending, and the list that its outputs will fill."""
    outputs: List[np.ndarray] = []

    def pairs(session: Session) -> Pairs:
        outputs.clear()
        for tokens, expected in endings:
            session.reset()
            outputs.append(session.prefill(tokens, chunk=tokens.shape[1], **arguments))
            yield outputs[-1][:, -expected.shape[1] :], expected

    return Cell(f"{name}: {FULL_PASS}", pairs), outputs


def _coordinates(session: Session, case: AttributeCase, full: np.ndarray) -> Pairs:
    """Prefill in chunks with other coordinates for every token, rewind, and repeat the last."""
    grid = case.attributes["grid"]
    yield session.prefill(case.tokens, chunk=7, grid=grid), full
    for back in range(1, min(6, case.tokens.shape[1])) if session.manifest.states else ():
        session.rewind(back)
        yield session.prefill(case.tokens[:, -back:], grid=grid[:, :, -back:]), full[:, -back:]


def _segments(session: Session, case: AttributeCase, full: np.ndarray) -> Pairs:
    yield session.prefill(case.tokens, attention_mask=case.mask, **case.attributes), full
