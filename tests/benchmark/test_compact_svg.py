"""Short SVG: what is drawn stays, what is not visible goes."""

import io
import re
from typing import Any, List

import pytest

from bench.compact_svg import compact

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def _drawn() -> str:
    """A picture with a line of 64 points, markers and a text."""
    from matplotlib.figure import Figure

    figure, file = Figure(figsize=(2, 2)), io.StringIO()
    axes: Any = figure.add_subplot()
    axes.plot([(k * 37 % 64) / 7 for k in range(64)], "o-")
    axes.set_title("a < b")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg")
    return file.getvalue()


def _line(picture: str) -> List[float]:
    path = max(re.findall(r' d="([^"]*)"', picture), key=len)
    return [float(number) for number in re.findall(r"-?[\d.]+", path)]


def test_no_point_of_a_line_moves_by_more_than_half_a_hundredth_of_a_point() -> None:
    drawn = _drawn()
    before, after = _line(drawn), _line(compact(drawn))
    assert len(before) == 128
    assert max(abs(x - y) for x, y in zip(before, after, strict=True)) < 0.0051


def test_a_compact_picture_has_the_same_paths_uses_and_texts_in_fewer_bytes() -> None:
    drawn = _drawn()
    short = compact(drawn)
    count = [
        [len(re.findall(tag, text)) for tag in ("<path", "<use", "<text", "a &lt; b</text>")]
        for text in (re.sub("(?s)<!--.*?-->", "", drawn), short)
    ]
    assert count[0] == count[1] and count[0][3] == 1
    assert len(short) < 0.85 * len(drawn) and "metadata" not in short


def test_every_reference_of_a_compact_picture_is_defined() -> None:
    short = compact(_drawn())
    referenced = set(re.findall(r'(?:href="|url\()#(\w+)', short))
    assert referenced and referenced == set(re.findall(r' id="(\w+)"', short))


def test_equal_figures_give_equal_text() -> None:
    assert compact(_drawn()) == compact(_drawn())
