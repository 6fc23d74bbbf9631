"""Mutations change one place of a source, and are found by a test that sees the difference."""

import ast
from pathlib import Path

import pytest

from tests.mutations import mutations, tried

SOURCE = b"""
LIMIT = 5

def first(x: int, y: int = 2) -> bool:
    \"\"\"A number, 3.\"\"\"
    return not x + y < 7 and x != -1  # \xc3\xa9
"""


def test_every_operator_number_and_condition_of_a_function_is_mutated_alone() -> None:
    results = [mutation.applied(SOURCE) for mutation in mutations(SOURCE)]
    assert [result.splitlines()[5].decode()[11:-5] for result in results] == [
        "(not x + y < 7 or x != -1)",
        "(x + y < 7) and x != -1",
        "not x + y < 7 and (x == -1)",
        "not (x + y <= 7) and x != -1",
        "not x + y < 7 and x != (1)",
        "not (x - y) < 7 and x != -1",
        "not x + y < (8) and x != -1",
        "not x + y < 7 and x != -(2)",
    ]
    for result in results:
        ast.parse(result)


@pytest.mark.parametrize(("line", "found"), [("assert one(3) == 4", True), ("one(3)", False)])
def test_a_mutation_is_found_by_a_test_that_asserts_what_it_changes(
    line: str, found: bool, tmp_path: Path
) -> None:
    source = b"def one(x):\n    return x + 1\n"
    (tmp_path / "some.py").write_bytes(source)
    (tmp_path / "test_one.py").write_text(f"from some import one\ndef test_one():\n    {line}\n")
    first = next(mutations(source))
    row = tried(tmp_path, "some.py", first, ["test_one.py"])
    assert row["by"] == ("test_one.py::test_one" if found else "") and row["line"] == 2
    assert (tmp_path / "some.py").read_bytes() == source
