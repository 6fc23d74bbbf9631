"""JSON files of results have one line for each row."""

import json
from pathlib import Path

import pytest

from bench import json_rows

TOP = Path(__file__).parents[2]
COMMITTED = [
    *sorted((TOP / "bench/results").glob("*.json")),
    *sorted((TOP / "docs").glob("*.json")),
]


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        1,
        [[1, 2], {"a": None}],
        {"rows": [{"of": {"x": 0.1}}] * 30, 256: (1, 2)},
        ["é" * 500, [{"a": []}]],
    ],
)
def test_a_value_is_read_back_as_it_was_written(value: object, tmp_path: Path) -> None:
    json_rows.write(tmp_path / "rows.json", value)
    assert json.loads((tmp_path / "rows.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(value)
    )


def test_each_row_of_a_list_has_a_line(tmp_path: Path) -> None:
    json_rows.write(
        tmp_path / "rows.json",
        {
            "machine": {"cores": 2},
            "rows": [{"name": name, "seconds": {"low": 1, "high": 2}} for name in range(30)],
        },
    )
    lines = (tmp_path / "rows.json").read_text(encoding="utf-8").splitlines()
    assert lines[1:4] == [
        ' "machine": {"cores": 2},',
        ' "rows": [',
        '  {"name": 0, "seconds": {"low": 1, "high": 2}},',
    ]
    assert len(lines) == 35


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_a_committed_file_of_results_has_one_line_for_each_row(path: Path, tmp_path: Path) -> None:
    json_rows.write(tmp_path / "rows.json", json.loads(path.read_text(encoding="utf-8")))
    assert path.read_text(encoding="utf-8") == (tmp_path / "rows.json").read_text(encoding="utf-8")
