"""Pictures of encodings on a grid, built-in ones and those of a user."""

import cmath
import math
from typing import Any, Iterator

import numpy as np
import pytest
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.catalogue.plots import View, draw
from posenc_export.encodings import Geometry, Oracle, PositionEncoding, Table
from posenc_export.encodings.shared.rotary import multiply_pairs
from posenc_export.shared.numerics import tolerance

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
BOUND = tolerance("float32", 1, 16)


class Slanted(PositionEncoding):
    """Pair k is rotated by (row + 2 column) / (k + 1)."""

    axes = 2

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        angles = np.arange(3 * geometry.max_positions)[:, None] / (
            np.arange(geometry.head_size // 2) + 1
        )
        self.cos, self.sin = Table(np.cos(angles)), Table(np.sin(angles))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        number = positions[0] + 2 * positions[1]
        cos, sin = self.cos(number).unsqueeze(2), self.sin(number).unsqueeze(2)
        return ops.apply_rotation(q, cos, sin, False), ops.apply_rotation(k, cos, sin, False)


class SlantedOracle(Oracle, of=Slanted):
    def rotate(self, x: np.ndarray, position: Any) -> np.ndarray:
        row, column = (position, position) if isinstance(position, int) else position
        return multiply_pairs(
            x, [cmath.exp(1j * (row + 2 * column) / (k + 1)) for k in range(len(x) // 2)], False
        )


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    encodings.register("slanted", Slanted)
    yield
    del encodings.KNOWN.registered["slanted"]


def _map(figure: Any, title: str) -> Any:
    return next(axes for axes in figure.axes if title in axes.get_title()).images[0].get_array()


def test_an_own_rotation_of_a_grid_is_drawn_as_a_map_around_the_query() -> None:
    seen = _map(
        draw({"name": "slanted"}, View(distance=15, head_size=16)),
        "score of equal vectors, by place of the key",
    )
    expected = sum(math.cos((3 + 2 * -2) / (k + 1)) for k in range(8)) / 8
    assert seen[16, 16] == seen.max() == 1 and abs(seen[19, 14] - expected) <= BOUND


def test_an_own_rotation_of_a_grid_is_drawn_along_each_axis() -> None:
    figure = draw({"name": "slanted"}, View(distance=15, head_size=16))
    lines = {
        line.get_label(): line.get_ydata()
        for axes in figure.axes
        if "along one axis" in axes.get_title()
        for line in axes.lines
    }
    expected = {
        "row": sum(math.cos(6 / (k + 1)) for k in range(8)) / 8,
        "column": sum(math.cos(12 / (k + 1)) for k in range(8)) / 8,
    }
    assert lines.keys() == expected.keys() and all(
        abs(lines[name][6] - value) <= BOUND for name, value in expected.items()
    )


def test_one_function_of_a_window_is_drawn_as_a_map() -> None:
    near = encodings.bias(lambda head, query, key: -(query // 5 - key // 5).abs() * (head + 1.0))
    near.window = (3, 5)
    encodings.register("rows_apart", near)
    try:
        seen = _map(draw({"name": "rows_apart"}, View(distance=15)), "by place of the key")
    finally:
        del encodings.KNOWN.registered["rows_apart"]
    assert seen.shape == (3, 5) and seen[:, 0].tolist() == [-1, 0, -1]


@pytest.mark.parametrize("name", ["sinusoidal_2d", "learned_2d"])
def test_tokens_on_a_grid_are_drawn_by_their_likeness_to_the_token_in_the_middle(name: str) -> None:
    seen = _map(draw({"name": name}, View(distance=15)), "by place")
    assert (
        seen.shape == (33, 33) and abs(seen[16, 16] - 1) <= BOUND and seen[0, 0] < seen[15, 15] < 1
    )
