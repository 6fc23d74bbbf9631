"""A test run says in one line which encoding is not registered, and what did not run."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import left_out, unregistered


def _report(reason: str) -> Any:
    return SimpleNamespace(longrepr=("tests/test_a.py", 3, f"Skipped: {reason}"))


def test_skipped_tests_are_counted_by_reason_in_one_line() -> None:
    reasons = ["g++ is not installed"] * 467
    reasons += ["could not import 'ray': No module named 'ray'", "this processor has no avx512"]
    assert left_out(map(_report, reasons)) == (
        "tests or files that did not run here: 467 because g++ is not installed, "
        "1 because there is no 'ray', 1 because this processor has no avx512"
    )
    assert left_out([]) == "tests or files that did not run here: none"


@pytest.mark.parametrize(
    ("registered", "noted", "missing"),
    [
        (["rope"], ["rope", "slow"], "NAMES of posenc_export/encodings/__init__.py"),
        (["rope", "slow"], ["rope"], "bench/texts/encodings.toml"),
        (["rope", "slow"], ["rope", "slow"], ""),
    ],
)
def test_a_forgotten_registration_is_one_line(registered: Any, noted: Any, missing: str) -> None:
    said = f"encoding slow: expected it in {missing}, got none; add it there"
    assert unregistered({"rope", "slow"}, registered, noted) == (said if missing else "")
