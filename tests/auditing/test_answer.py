"""What the errors of single tokens have in common."""

import re
from typing import Any

import numpy as np
import pytest

from posenc_export.auditing.answer import COLUMNS, Answer, AuditedCell, Columns, Observed, answer
from posenc_export.auditing.auditor import verdict_of


def observed(columns: Columns, limit: float = 1e-5) -> Observed:
    return Observed([], columns, {}, {}, np.full(len(columns["error"]), limit))


@pytest.mark.parametrize("fixed", [False, True])
def test_what_every_call_has_is_no_cause(fixed: bool) -> None:
    """All tokens of calls of two rows are wrong, and there are no other calls if rows are fixed."""
    tokens = 40
    columns = {name: np.zeros(tokens) for name in COLUMNS}
    columns["index"] = np.arange(tokens) % 10
    columns["new"] = np.full(tokens, 10)
    columns["rows"] = np.full(tokens, 2) if fixed else 1 + np.arange(tokens) // 20
    columns["error"] = np.where(columns["rows"] == 2, 0.5, 0.0)
    said = answer(observed(columns), {})
    assert said.cause == ("everywhere" if fixed else "row")
    assert ("several rows" in said.sentence) == (not fixed)


def table(*kinds: tuple[int, int, dict[str, int]], limit: float = 1e-5) -> Observed:
    """Return the tokens of cells of 30 tokens, which are wrong from some token on up to another.
    kinds: these two, and numbers of COLUMNS.
    """
    parts = []
    for cell, (first, end, others) in enumerate(kinds):
        index = np.arange(30.0)
        columns = {"cell": cell, "rows": 1, "new": 30, "index": index, **others}
        columns["error"] = np.where((index >= first) & (index < end), 0.5, 0.0)
        parts.append([np.broadcast_to(columns.get(name, 0), 30) for name in COLUMNS])
    joined = dict(zip(COLUMNS, np.concatenate(parts, axis=1), strict=True))
    return observed(joined, limit)


PLAIN: dict[str, int] = {}
CACHE, PADDED, ROWS, START = {"before": 4}, {"padding": 2}, {"rows": 3}, {"start": 5}
TABLES = [
    ((18, 30, CACHE), (15, 30, {**CACHE, **ROWS}), (30, 30, PLAIN)),
    ((18, 30, CACHE), (17, 30, PADDED), (30, 30, PLAIN)),
    ((18, 30, PLAIN), (15, 30, PADDED), (17, 30, CACHE)),
    ((18, 30, PLAIN), (30, 30, CACHE), (15, 20, ROWS)),
    ((18, 30, PADDED), (16, 30, {**PADDED, **START}), (15, 17, ROWS), (30, 30, PLAIN)),
]


@pytest.mark.parametrize("kinds", TABLES)
def test_the_sentence_names_the_first_wrong_position_of_the_cells(kinds: Any) -> None:
    said = answer(table(*kinds), {}).sentence
    firsts = [first for first, _, _ in kinds if first < 30]
    assert min(map(int, re.findall(r"from position (\d+)", said))) == min(firsts), said
    assert ("in every call" in said) == (len(firsts) == len(kinds)), said


@pytest.mark.parametrize(
    ("features", "cause"),
    [
        (START, "offset"),
        (CACHE, "cache"),
        (PADDED, "padding"),
        (ROWS, "row"),
        (PLAIN, "everywhere"),
    ],
)
def test_a_cause_is_said_only_of_what_was_observed(features: dict[str, int], cause: str) -> None:
    kinds = [(0, 30, features), (30, 30, PLAIN if features else CACHE)]
    said = answer(table(*kinds), {})
    assert said.cause == cause and "every call" not in said.sentence
    for claim in ("not applied", "influence", "counts slots", "not ignored"):
        assert claim not in said.sentence
    infinite = table(*kinds)
    infinite.columns["error"][:30] = np.inf
    assert answer(infinite, {}).cause == "not finite"


@pytest.mark.parametrize("cause", ["angles", "position"])
def test_small_errors_are_of_angles_if_they_grow_gradually(cause: str) -> None:
    seen = table((16, 30, PLAIN), limit=1.65e-5)
    error = 1e-6 * (1 + seen.columns["index"])
    seen.columns["error"] = np.where(cause == "angles" or error < 1.65e-5, error, 8e-4)
    assert answer(seen, {}).cause == cause


def test_a_verdict_on_one_cell_counts_it_in_the_singular() -> None:
    one, other = AuditedCell("a", "right"), AuditedCell("b", "not possible", message="no cache")
    said = "right in 1 cell; 1 cell is not possible: no cache"
    assert verdict_of(Answer("right"), [one, other]) == ("right", said)
    said = "right in 2 cells; 2 cells are not possible: no cache"
    assert verdict_of(Answer("right"), [one, other] * 2) == ("right", said)
