"""docs/speed.md with artificial samples."""

from pathlib import Path

import pytest

from bench import speed, speed_page
from tests.benchmark import rows


def test_a_ratio_is_computed_round_by_round():
    report = rows.report(
        [
            rows.row("rope-ort", [1.0, 1.0, 2.0, 1.0, 1.0], tokens=128),
            rows.row("rope-ort-int8", [0.4, 0.4, 0.8, 0.4, 0.4], tokens=128),
        ]
    )
    assert speed_page.ratio(report, 128, "rope-ort-int8").high == pytest.approx(0.4)


def test_the_summary_names_contestants_that_are_measured():
    reports = speed.committed(Path("bench/results/speed.json"))
    for part, contestant, *_ in speed_page.SUMMARY:
        assert speed_page.ratio(reports[part], 128, contestant) is not None
    assert list(speed.PARTS) == list(speed_page.TITLES)


def test_the_page_in_docs_is_generated_from_the_committed_figures(tmp_path):
    speed_page.write(speed.committed(Path("bench/results/speed.json")), tmp_path)
    names = ["speed.md", "speed.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [
        name
        for name in names
        if (Path("docs") / name).read_text(encoding="utf-8")
        != (tmp_path / name).read_text(encoding="utf-8")
    ] == []
