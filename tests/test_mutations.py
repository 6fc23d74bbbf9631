"""Every place of tests/mutations.py stands in its file, and its tests exist."""

import re
import shlex
from pathlib import Path
from typing import Set

import pytest

from tests.mutations import MUTATIONS, TOP, Mutation, tried


@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file} {mutation.text}"
)
def test_the_text_of_a_mutation_stands_exactly_once_in_its_file_and_its_tests_exist(
    mutation: Mutation, request: pytest.FixtureRequest
) -> None:
    count = (TOP / "posenc_export" / mutation.file).read_text("utf-8").count(mutation.text)
    assert count == 1, (
        f"mutations: expected {mutation.text!r} exactly once in {mutation.file}, got "
        f"{count}; correct tests/mutations.py"
    )
    assert mutation.mutated != mutation.text
    collected = {item.nodeid.partition("@")[0] for item in request.session.items}
    for named in re.findall(r"tests/\S+", " ".join(shlex.split(mutation.tests))):
        path, _, test = named.partition("::")
        assert f"def {test.partition('[')[0]}" in (TOP / path).read_text("utf-8")
        assert "[" not in test or named in collected or not _whole(path, collected)


def _whole(path: str, collected: Set[str]) -> bool:
    """Return whether all tests of a file were collected, and not some of them."""
    defined = re.findall(r"^def (test_\w+)", (TOP / path).read_text("utf-8"), re.MULTILINE)
    tests = {test.partition("[")[0] for test in collected}
    return {f"{path}::{test}" for test in defined} <= tests


def test_a_mutation_that_changes_nothing_is_not_found_and_a_wrong_one_is(tmp_path: Path) -> None:
    (tmp_path / "posenc_export").mkdir()
    (tmp_path / "posenc_export/shared.py").write_text("ONE = 1\n")
    (tmp_path / "test_one.py").write_text(
        "from posenc_export.shared import ONE\n\n\ndef test_one() -> None:\n    assert ONE == 1\n"
    )
    rows = [
        tried(Mutation("shared.py", "ONE = 1", mutated, "test_one.py"), tmp_path)
        for mutated in ("ONE = 1.0", "ONE = 2")
    ]
    assert [row["by"] for row in rows] == ["", "test_one.py::test_one"]
    assert (tmp_path / "posenc_export/shared.py").read_text() == "ONE = 1\n"
