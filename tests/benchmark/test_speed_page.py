"""docs/speed.md with artificial samples."""

from pathlib import Path

import pytest

from bench import speed, speed_page
from bench.speed_page import TARGETS, Target, ratio
from posenc_export.benchmark.runtimes import RUNTIMES
from tests.benchmark import rows

BITS = [
    rows.row("rope-ort", [1.0, 1.0, 2.0, 1.0, 1.0], tokens=128),
    rows.row("rope-ort-int8", [0.4, 0.4, 0.8, 0.4, 0.4], tokens=128),
]
TARGET = Target("bits", "decode", 128, "rope-ort-int8", "rope-ort", 0.45)


def test_a_ratio_is_computed_round_by_round():
    assert ratio(rows.report(BITS), TARGET).high == pytest.approx(0.4)


def test_the_page_says_which_targets_are_met():
    page = speed_page.targets_page({"bits": rows.report(BITS)})
    assert (
        "| bits | decode 128 | `rope-ort-int8` | `rope-ort` | 0.40 | 0.40 .. 0.40 | 0.45 | met |"
    ) in page
    assert "| bits | decode 1024 | `rope-ort-int8` | `rope-ort` |  |  | 0.45 |  |" in page


def test_every_target_names_a_part_and_a_number_of_tokens_that_are_measured():
    measured = {
        name: {"decode": part.contexts, "prefill": part.prompts}
        for name, part in speed.PARTS.items()
    }
    assert all(target.tokens in measured[target.part][target.phase] for target in TARGETS)
    assert list(speed.PARTS) == list(speed_page.TITLES)


def test_every_target_names_contestants_of_its_part():
    for target in TARGETS:
        part = speed.PARTS[target.part]
        own, several = (
            {variant.name for variant in part.variants},
            len({variant.encoding for variant in part.variants}) > 1,
        )
        rebuilt = {
            f"{name} rope" if several else name for name in part.runtimes if RUNTIMES[name].builds
        }
        loaded = {f"{name} on {folder}" for name in part.runtimes for folder in own}
        assert {target.ours, target.theirs} <= own | rebuilt | loaded


def test_the_pages_in_docs_are_generated_from_the_committed_figures(tmp_path):
    speed_page.write(speed.committed(Path("bench/results/speed.json")), tmp_path)
    names = ["speed-targets.md", "speed.md", "speed.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [
        name
        for name in names
        if (Path("docs") / name).read_text(encoding="utf-8")
        != (tmp_path / name).read_text(encoding="utf-8")
    ] == []
