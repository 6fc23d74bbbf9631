"""Learned positions of boxes on a page on tokens (Xu et al. 2020, LayoutLM, 2.2; Huang et al. 2022,
LayoutLMv3, 3.1, its code).
"""

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.rotary import Place
from posenc_export.shared.refusal import refusal


class Boxes(PositionEncoding):
    """x + X[left] + Y[upper] + X[right] + Y[lower] + H[lower - upper] + W[right - left], or x +
    [these six rows] concatenated, whose widths have the sum E; X, Y, H, W trained.

    A height or width below 0 counts as 0.

    Range: coordinates [4,B,S], the left, upper, right and lower edge of a box, each 0 .. size - 1.
    If size is given, coordinates may be left out and are then 0.

    Args:
        geometry: width E.
        size: rows of each table; max_2d_position_embeddings. 0 for max_positions.
        extent: width of H and W in concatenated rows, where X and Y have (E - 2 extent) / 4, an
            integer above 0; shape_size. 0 to add rows.

    Weights:
        of_x.weight, of_y.weight, of_height.weight, of_width.weight: X, Y, H, W, [size,width].
    """

    axes = 4
    works_in = ("bidirectional",)
    least = {"size": 0, "extent": 0}
    most = {"size": 1 << 20, "extent": 1 << 20}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], coordinates [4,B,S] int64 to [B,S,E] in x's dtype."""
        places = positions.clamp(0, self.size - 1)
        extents = (positions[2:] - positions[:2]).clamp(0, self.size - 1)  # [2,B,S]
        edges = [self.of_x(places[0]), self.of_y(places[1]), self.of_x(places[2])]
        rows = edges + [self.of_y(places[3]), self.of_height(extents[1]), self.of_width(extents[0])]
        if self.joined:
            return x + torch.cat(rows, dim=-1)
        for row in rows:
            x = x + row
        return x

    def row_rules(self) -> list[str]:
        places = ["x0", "x1", "x2", "x3", "x2 - x0", "x3 - x1"]
        return [f"min(max({place}, 0), {self.size - 1})" for place in places]

    def __init__(self, geometry: Geometry, size: int = 0, extent: int = 0) -> None:
        super().__init__()
        self.size, self.coordinate_range = size or geometry.max_positions, size
        self.joined = extent > 0
        edge, rest = divmod(geometry.width - 2 * extent, 4) if extent else (geometry.width, 0)
        if rest or edge < 1:
            rule = "a width E with E - 2 extent above 0 and divisible by 4"
            raise refusal("boxes", rule, geometry.width, "choose another extent")
        self.of_x, self.of_y = (torch.nn.Embedding(self.size, edge) for _ in range(2))
        of_extents = (torch.nn.Embedding(self.size, extent or edge) for _ in range(2))
        self.of_height, self.of_width = of_extents
        for table in (self.of_x, self.of_y, self.of_height, self.of_width):
            torch.nn.init.normal_(table.weight, std=0.02)  # as BERT and LayoutLM


class BoxesOracle(Oracle, of=Boxes):
    def embed(self, x: np.ndarray, position: Place) -> np.ndarray:
        """Encode x [E]; position is the box of a token, or one number for its four edges."""
        left, upper, right, lower = (position,) * 4 if isinstance(position, int) else position
        indices = {"of_x": (left, right), "of_y": (upper, lower)}
        x_rows, y_rows = ([self.row(name, i) for i in pair] for name, pair in indices.items())
        extents = self.row("of_height", lower - upper), self.row("of_width", right - left)
        rows = (x_rows[0], y_rows[0], x_rows[1], y_rows[1], *extents)
        return x + (np.concatenate(rows) if self.encoding.joined else np.sum(rows, axis=0))

    def row(self, table: str, index: int) -> np.ndarray:
        rows = self.weights[f"{table}.weight"]
        return rows[min(max(index, 0), len(rows) - 1)]
