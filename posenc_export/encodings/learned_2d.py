"""Learned positions of rows and columns on tokens of a grid (Carion et al. 2020, DETR, its code;
Lee et al. 2022, Pix2Struct, its code).
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.rotary import Place


class Learned2D(PositionEncoding):
    """x + R[row] + C[column], or x + [R[row], C[column]] in either order with tables of E/2
    entries; R, C trained.

    A coordinate of at least `rows` or `columns` marks a token outside the grid: its table adds
    nothing.

    Args:
        geometry: width E, even if tables are concatenated.
        rows, columns: sizes of R and C; 0 for max_positions.
        join: "sum", as Pix2Struct, or concatenated as "row_column" or as "column_row", as DETR.
    """

    axes = 2
    least = {"rows": 0, "columns": 0}
    most = {"rows": 1 << 20, "columns": 1 << 20}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], coordinates [2,B,S] int64 to [B,S,E] in x's dtype."""
        rows, columns = self.counts
        row = self.of_row(positions[0].clamp(0, rows - 1))  # [B,S,E or E/2]
        row = row.masked_fill(positions[0].ge(rows).unsqueeze(2), 0.0)
        column = self.of_column(positions[1].clamp(0, columns - 1))
        column = column.masked_fill(positions[1].ge(columns).unsqueeze(2), 0.0)
        if self.join == "sum":
            return x + row + column
        return x + torch.cat((row, column) if self.join == "row_column" else (column, row), dim=-1)

    def row_rules(self) -> list[str]:
        return [f"min(x{axis}, {count - 1})" for axis, count in enumerate(self.counts)]

    def __init__(
        self,
        geometry: Geometry,
        rows: int = 0,
        columns: int = 0,
        join: Literal["sum", "row_column", "column_row"] = "sum",
    ) -> None:
        super().__init__()
        if join != "sum":
            self.check_multiple("width", geometry.width, 2, "choose another width or join=sum")
        width = geometry.width if join == "sum" else geometry.width // 2
        self.join = join
        self.counts = (rows or geometry.max_positions, columns or geometry.max_positions)
        self.of_row, self.of_column = (torch.nn.Embedding(count, width) for count in self.counts)
        for table in (self.of_row, self.of_column):
            torch.nn.init.normal_(table.weight, std=0.02)  # the standard deviation of BERT and ViT


class Learned2DOracle(Oracle, of=Learned2D):
    def embed(self, x: np.ndarray, position: Place) -> np.ndarray:
        """Encode x [E]; position is the row and column of a token, or one number for both."""
        out = x.copy()
        for axis, table in enumerate(self.weights.values()):
            place = position if isinstance(position, int) else position[axis]
            # Whether the entries of the other table come first.
            second = self.encoding.join == ("column_row", "row_column")[axis]
            if place < len(table):
                out[len(x) // 2 if second else 0 :][: table.shape[1]] += table[place]
        return out
