"""What the errors of single tokens have in common."""

import numpy as np
import pytest

from posenc_export.auditing.answer import answer
from posenc_export.auditing.observing import COLUMNS, Observed


@pytest.mark.parametrize("fixed", [False, True])
def test_what_every_call_has_is_no_cause(fixed: bool) -> None:
    """All tokens of calls of two rows are wrong, and there are no other calls if rows are fixed."""
    tokens = 40
    columns = {name: np.zeros(tokens) for name in COLUMNS}
    columns["index"] = np.arange(tokens) % 10
    columns["new"] = np.full(tokens, 10)
    columns["rows"] = np.full(tokens, 2) if fixed else 1 + np.arange(tokens) // 20
    columns["error"] = np.where(columns["rows"] == 2, 0.5, 0.0)
    said = answer(Observed(["cell"], columns, {}, {}), np.full(tokens, 1e-5), {})
    assert said.cause == ("everywhere" if fixed else "row")
    assert ("several rows" in said.sentence) == (not fixed)
