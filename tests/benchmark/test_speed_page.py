"""docs/speed.md with artificial samples."""

from pathlib import Path

import pytest

from bench import speed, speed_page
from bench.speed_page import TARGETS, Target, ratio
from posenc_export.benchmark.runtimes import RUNTIMES
from tests.benchmark import rows

BLOCK = [
    rows.row("hand-written rope", [1.0, 1.0, 2.0, 1.0, 1.0], tokens=128),
    rows.row("rope-ort", [0.9, 0.9, 1.8, 0.9, 0.9], tokens=128),
]
TARGET = Target("block", "decode", 128, "rope-ort", "hand-written rope", 1.0)


def test_a_ratio_is_computed_round_by_round():
    assert ratio(rows.report(BLOCK), TARGET).high == pytest.approx(0.9)


def test_the_page_says_which_targets_are_met():
    page = speed_page.targets_page({"block": rows.report(BLOCK)})
    assert (
        "| block | decode 128 | `rope-ort` | `hand-written rope` | 0.90 | 0.90 .. 0.90 | "
        "1.00 | met |"
    ) in page
    assert "| block | decode 1024 | `rope-ort` | `hand-written rope` |  |  | 1.00 |  |" in page


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
