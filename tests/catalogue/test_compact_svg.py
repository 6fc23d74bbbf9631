"""Short SVG: what is drawn stays, what is not visible goes."""

import io
import re
from typing import Any, List, Tuple

import pytest

from posenc_export.catalogue.compact_svg import compact

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def _drawn() -> bytes:
    """A picture with a line of 64 points, markers and a text."""
    from matplotlib.figure import Figure

    figure, file = Figure(figsize=(2, 2)), io.BytesIO()
    axes: Any = figure.add_subplot()
    axes.plot([(k * 37 % 64) / 7 for k in range(64)], "o-")
    axes.set_title("a < b")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg")
    return file.getvalue()


def _points(path: str) -> List[Tuple[float, float]]:
    """The points of a path of absolute or of relative lines."""
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    if "l" in path:
        points = [
            (sum(x for x, _ in points[: n + 1]), sum(y for _, y in points[: n + 1]))
            for n in range(len(points))
        ]
    return points


def test_no_point_of_a_line_moves_by_more_than_half_a_tenth_of_a_point() -> None:
    drawn = _drawn()
    before, after = (
        _points(max(re.findall(r' d="([^"]*)"', text), key=len))
        for text in (drawn.decode(), compact(drawn))
    )
    assert len(before) == len(after) == 64
    assert (
        max(
            abs(x - y)
            for one, other in zip(before, after, strict=True)
            for x, y in zip(one, other, strict=True)
        )
        < 0.051
    )


def test_a_compact_picture_has_the_same_paths_uses_and_texts_in_half_the_bytes() -> None:
    drawn = _drawn()
    short = compact(drawn)
    count = [
        [len(re.findall(tag, text)) for tag in ("<path", "<use", "<text", "a &lt; b</text>")]
        for text in (re.sub("(?s)<!--.*?-->", "", drawn.decode()), short)
    ]
    assert count[0] == count[1] and count[0][3] == 1
    assert len(short) < len(drawn) / 2 and short.count("\n") < 8 and "metadata" not in short


def test_every_style_and_every_reference_of_a_compact_picture_is_defined() -> None:
    short = compact(_drawn())
    assert set(re.findall(r'class="(\w+)"', short)) == set(re.findall(r"\.(s\d+){", short))
    assert set(re.findall(r'href="#(\w+)"|url\(#(\w+)\)', short)) and set(
        re.findall(r"#(i\d+)", short)
    ) == set(re.findall(r' id="(\w+)"', short))


def test_equal_figures_give_equal_text() -> None:
    assert compact(_drawn()) == compact(_drawn())
