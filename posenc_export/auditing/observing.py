"""Errors of single tokens, with the call in which each was read."""

from dataclasses import dataclass
from typing import Dict, List, Sequence

import numpy as np

from posenc_export.auditing.inputs import NotPossible
from posenc_export.auditing.session import TAGS, ForeignSession
from posenc_export.runtime.verification import measuring, proof
from posenc_export.runtime.verification.case import Cell, Pairs

# What is known of each compared token, one number each.
COLUMNS = (
    "cell", "row", "rows", "index", "start", "new", "past", "before", "padding", "behind", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Observed:
    """The compared tokens of all cells."""

    names: List[str]  # of the cells that ran
    columns: Dict[str, np.ndarray]  # numbers of COLUMNS [N] by token; "cell" counts `names`
    failures: Dict[str, str]  # message of the graph for each cell in which it failed
    impossible: Dict[str, str]  # what the inputs of the graph cannot express, by cell


def observe(
    session: ForeignSession, cells: Sequence[Cell], accuracy: proof.Accuracy, width: int
) -> Observed:
    """Measure cells, and keep each token's error relative to the largest of `width` outputs."""
    names: List[str] = []
    parts: List[np.ndarray] = []
    impossible: Dict[str, str] = {}

    def recording(cell: Cell) -> Cell:
        def pairs(session: ForeignSession) -> Pairs:
            try:
                for actual, expected in cell.pairs(session):
                    parts.append(_tokens(session, len(names), actual, expected))
                    yield actual, expected
            except NotPossible as error:
                impossible[cell.name] = str(error)
            finally:
                names.append(cell.name)

        return Cell(cell.name, pairs)

    measured = measuring.measure_cells(session, map(recording, cells), accuracy, [np.arange(width)])
    table = np.concatenate([np.zeros((len(COLUMNS), 0)), *parts], axis=1)
    ran = {name for name in measured.cells if name not in impossible}
    table = table[:, [names[int(cell)] in ran for cell in table[0]]]
    return Observed(names, dict(zip(COLUMNS, table, strict=True)), measured.failures, impossible)


def _tokens(
    session: ForeignSession, cell: int, actual: np.ndarray, expected: np.ndarray
) -> np.ndarray:
    """Return COLUMNS [11,n] of the tokens of a pair."""
    values, tags = actual[..., :-TAGS], actual[..., -TAGS:].reshape(-1, TAGS).astype(np.int64)
    scale = float(np.abs(expected).max(initial=0)) or 1.0
    difference = np.abs(values.astype(np.float64) - expected[..., : values.shape[-1]])
    errors = np.nan_to_num(difference.max(-1).ravel() / scale, nan=np.inf, posinf=np.inf)
    errors, tags = errors[tags[:, 2] >= 0], tags[tags[:, 2] >= 0]
    table = np.zeros((len(COLUMNS), len(tags)))
    for column, ((row, index, number), error) in enumerate(zip(tags, errors, strict=True)):
        call, at = session.calls[number], row if row < session.calls[number].rows else 0
        table[:, column] = (
            cell, row, call.rows, index, call.start[at], call.new, call.past, call.before[at],
            call.padding[at], call.behind[at], error,
        )  # fmt: skip
    return table
