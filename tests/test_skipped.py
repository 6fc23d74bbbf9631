"""What did not run is said in one line at the end of a test run."""

from types import SimpleNamespace
from typing import Any

from tests.conftest import left_out


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
