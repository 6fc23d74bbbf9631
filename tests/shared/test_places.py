"""Rules of positions: their values, for numbers, arrays and a solver, and what is no rule."""

from typing import Any

import numpy as np
import pytest
import z3

from posenc_export.runtime.verification.symbolic import SOLVER
from posenc_export.shared.places import DEEPEST, LONGEST, evaluate

RULES: dict[str, Any] = {
    "k <= q and q - k < 4": lambda q, k: 0 <= q - k < 4,
    "0 <= k <= q or not q == k": lambda q, k: 0 <= k <= q or q != k,
    "q // 3 == k // 3": lambda q, k: q // 3 == k // 3,
    "q % 4 * 2 + -1": lambda q, k: q % 4 * 2 - 1,
    "min(max(q - k, 0), 5)": lambda q, k: min(max(q - k, 0), 5),
    "abs(q - k) if q > 2 else 7": lambda q, k: abs(q - k) if q > 2 else 7,
    "count(q - k, 0, 1, 1, 5)": lambda q, k: sum(q - k >= n for n in (0, 1, 1, 5)),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_the_same_for_numbers_arrays_and_the_solver(rule: str) -> None:
    q, k = (part.ravel() for part in np.mgrid[-3:12, -3:12])
    wanted = [int(RULES[rule](int(a), int(b))) for a, b in zip(q, k, strict=True)]
    assert np.array_equal(np.asarray(evaluate(rule, {"q": q, "k": k})).astype(int), wanted)
    x, y = z3.Ints("x y")
    symbolic = evaluate(rule, {"q": x, "k": y}, SOLVER)
    for a, b, number in zip(q.tolist(), k.tolist(), wanted, strict=True):
        assert int(evaluate(rule, {"q": a, "k": b})) == number
        pairs = ((x, z3.IntVal(a)), (y, z3.IntVal(b)))
        value = z3.simplify(z3.substitute(symbolic, *pairs))
        assert (z3.is_true(value) if z3.is_bool(value) else value.as_long()) == number


@pytest.mark.parametrize(
    "rule",
    [
        *("", "q +", "p", "q ** 2", "q / 2", "q // k", "q % 0", "q.real", "q[0]", "'q'", "1.5"),
        *("print(q)", "max()", "min(q, key=k)", "[q]", "lambda: q", "q is k", "(q := 3)"),
        *("-" * (DEEPEST + 1) + "q", "q + " * DEEPEST + "q" + " + q" * 2, "q" + " " * LONGEST),
    ],
)
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="places: expected a rule of whole numbers"):
        evaluate(rule, {"q": 3, "k": 1})
