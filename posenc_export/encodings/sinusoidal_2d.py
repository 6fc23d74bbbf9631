"""Sinusoids of rows and columns on tokens of a grid (He et al. 2021, Masked Autoencoders, A.1; Zhao et al. 2023, RT-DETR)."""

import math
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table
from posenc_export.encodings.shared.rotary import check_choice
from posenc_export.encodings.shared.rotary_grid import Place

FIRST = ("row", "column")
LAYOUTS = ("halves", "interleaved")


class Sinusoidal2D(PositionEncoding):
    """x * scale + factor [s(row), s(column)], s(p) = [sin(p w_k), cos(p w_k)] of d/2 entries, w_k = base^(-4k/d), k = 0 .. d/4 - 1.

    A coordinate of at least `rows` or `columns` marks a token outside the grid and adds zeros, as for the class token of MAE.

    Hook: embed. State: none. Range: coordinates [2,B,S], each 0 .. max_positions - 1.

    Args:
        geometry: width d, a multiple of 4.
        base: ratio of the longest wavelength to 2 pi.
        first: coordinate of the first half of the entries, "row", as RT-DETR, or "column", as MAE.
        layout: order within each half; "halves" puts all sines before all cosines, as the code of both papers; "interleaved" alternates sin and cos of w_k.
        rows, columns: size of the grid; 0 for max_positions.
        scale: factor on the token embedding.
        factor: factor on the sinusoids.

    Raises:
        ValueError: a width that is not a multiple of 4, unknown first or layout, base not above 1, negative rows or columns.
    """

    axes = 2

    def __init__(
        self,
        geometry: Geometry,
        base: float = 10000.0,
        first: str = "row",
        layout: str = "halves",
        rows: int = 0,
        columns: int = 0,
        scale: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        check_choice("sinusoidal_2d", "first", first, FIRST)
        check_choice("sinusoidal_2d", "layout", layout, LAYOUTS)
        if geometry.width % 4:
            raise ValueError(f"sinusoidal_2d: expected a width that is a multiple of 4, got {geometry.width}; choose another width")
        if not base > 1 or min(rows, columns) < 0:
            raise ValueError(f"sinusoidal_2d: expected base above 1, and rows and columns of 0 or more, got {base}, {rows} and {columns}")
        self.base, self.first, self.layout, self.scale, self.factor = float(base), FIRST.index(first), layout, float(scale), float(factor)
        longest, pairs = geometry.max_positions, geometry.width // 4
        self.counts = (rows or longest, columns or longest)
        angles = np.arange(longest)[:, None] * self.base ** (-np.arange(pairs) / pairs)
        waves = (np.sin(angles), np.cos(angles))
        table = np.concatenate(waves, axis=1) if layout == "halves" else np.stack(waves, axis=2).reshape(longest, -1)
        self.of_row, self.of_column = (Table(self.factor * table * (np.arange(longest) < count)[:, None]) for count in self.counts)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], coordinates [2,B,S] int64 to [B,S,E] in x's dtype."""
        halves = [self.of_row(positions[0]), self.of_column(positions[1])]
        return x * self.scale + torch.cat((halves[self.first], halves[1 - self.first]), dim=-1).to(x.dtype)

    def oracle(self) -> Oracle:
        return Sinusoidal2DOracle(self.base, self.first, self.layout, self.counts, self.scale, self.factor)


class Sinusoidal2DOracle(Oracle):
    def __init__(self, base: float, first: int, layout: str, counts: Sequence[int], scale: float, factor: float) -> None:
        self.base, self.first, self.layout, self.counts, self.scale, self.factor = base, first, layout, counts, scale, factor

    def embed(self, x: np.ndarray, position: Place) -> np.ndarray:
        """Encode x [E]; position is the row and column of a token, or one number for both."""
        half, pairs = len(x) // 2, len(x) // 4
        out = np.array([value * self.scale for value in x])
        for n in range(len(x)):
            axis, index = (self.first + n // half) % 2, n % half
            place = position if isinstance(position, int) else position[axis]
            k, cosine = (index % pairs, index >= pairs) if self.layout == "halves" else (index // 2, index % 2 == 1)
            angle = place / math.pow(self.base, k / pairs)
            if place < self.counts[axis]:
                out[n] += self.factor * (math.cos(angle) if cosine else math.sin(angle))
        return out
