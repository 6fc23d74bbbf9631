"""Sinusoids of rows and columns on tokens of a grid (He et al. 2021, Masked Autoencoders, A.1;
Zhao et al. 2023, RT-DETR).
"""

import functools
from typing import Literal, Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared import sinusoids
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Rows
from posenc_export.encodings.shared.rotary import Place


class Sinusoidal2D(PositionEncoding):
    """x * scale + factor [s(row), s(column)], s(p) = [sin(p w_k), cos(p w_k)] of d/2 entries, w_k =
    base^(-4k/d), k = 0 .. d/4 - 1.

    A coordinate of at least `rows` or `columns` marks a token outside the grid and adds zeros, as
    for the class token of MAE.

    Args:
        geometry: width d, a multiple of 4.
        base: base of the frequencies.
        first: coordinate of the first half of the entries, "row", as RT-DETR, or "column", as MAE.
        layout: order within each half; "halves" puts all sines before all cosines, as the code of
            both papers; "interleaved" alternates sin and cos of w_k.
        rows, columns: size of the grid; 0 for max_positions.
        scale: factor on the token embedding.
        factor: factor on the sinusoids.
    """

    axes = 2
    above = {"base": 1}
    least = {"rows": 0, "columns": 0}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], coordinates [2,B,S] int64 to [B,S,E] in x's dtype."""
        halves = [self.of_row(positions[0]), self.of_column(positions[1])]
        scaled = ops.scale(x, self.scale)
        return scaled + torch.cat((halves[self.first], halves[1 - self.first]), -1).to(x.dtype)

    def __init__(
        self,
        geometry: Geometry,
        base: float = 10000.0,
        first: Literal["row", "column"] = "row",
        layout: Literal["halves", "interleaved"] = "halves",
        rows: int = 0,
        columns: int = 0,
        scale: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.check_multiple("width", geometry.width, 4)
        self.base, self.interleaved = float(base), layout == "interleaved"
        self.first, self.scale, self.factor = int(first == "column"), float(scale), float(factor)
        count = geometry.max_positions
        self.pairs, self.counts = geometry.width // 4, (rows or count, columns or count)
        self.of_row, self.of_column = (self.filled(name, count) for name in self.formulas())

    def formulas(self) -> Mapping[str, Rows]:
        frequencies = self.base ** (-np.arange(self.pairs) / self.pairs)

        def waves(places: np.ndarray, count: int) -> np.ndarray:
            rows = self.factor * sinusoids.rows(places * frequencies, self.interleaved)
            return np.where(places < count, rows, 0.0)

        rows, columns = (functools.partial(waves, count=count) for count in self.counts)
        return {"of_row": rows, "of_column": columns}


class Sinusoidal2DOracle(Oracle, of=Sinusoidal2D):
    def embed(self, x: np.ndarray, position: Place) -> np.ndarray:
        """Encode x [E]; position is the row and column of a token, or one number for both."""
        places = (position, position) if isinstance(position, int) else position
        formulas = zip(self.tables().values(), places, strict=True)
        halves = [rows(np.array([[float(place)]]))[0] for rows, place in formulas]
        order = (1, 0) if self.encoding.first else (0, 1)
        return x * self.encoding.scale + np.concatenate([halves[axis] for axis in order])
