"""The cells of the parity grid: which scenarios are compared with which expected outputs.

A graph that computes in float32 is compared with the expected outputs in every cell. If a graph
rounds activations, the call that reads all tokens (the full pass) is compared with the expected
outputs, and every other division of the tokens into calls with the full pass of the same graph,
which is closer.

Shapes: B batch, L tokens of a sequence, V numbers of an output.
"""

import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import grid_inputs
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
Ending = Tuple[np.ndarray, np.ndarray]  # tokens, and expected outputs of the last of them


def cells_of(manifest: Manifest, expected: Expected, rounds: bool, level: Level) -> Iterator[Cell]:
    """Yield all cells of a grid. Those of the full pass keep the outputs that others are compared
    with. rounds: whether the graph rounds activations.
    """
    if expected.long is not None and level is Level.WHOLE:
        yield from long_cells(manifest, expected.long, rounds)
    for case in _cases(manifest, expected, level):
        starts = [case.start] if isinstance(case.start, int) else case.start
        plural = "s" if len(starts) > 1 else ""
        name = f"batch {len(case.tokens)}, start{plural} {', '.join(map(str, starts))}"
        yield from _case_cells(manifest, name, case, rounds, level)
    for name, (attributes, full) in expected.attribute_cases.items():
        if level >= Level.QUICK:
            yield from _attribute_cells(name, attributes, full, rounds)


def _cases(manifest: Manifest, expected: Expected, level: Level) -> List[Case]:
    """Return the cases of a grid: several rows, which with caches have different starts, and one
    row.
    """
    cases = list(expected.cases.values())
    if manifest.states and level >= Level.QUICK:
        cases = [_beside_each_other(cases)]
    if level <= Level.QUICK:
        return cases[:1]
    return [*cases, cases[0].rows(min(grid_inputs.BATCHES))]


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
    if manifest.states and manifest.layout != "columns":
        scenarios.append(OF_ROWS)
    return [scenario for scenario in scenarios if scenario.level <= level]


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
