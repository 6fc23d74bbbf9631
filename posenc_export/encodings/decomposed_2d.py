"""Decomposed relative positions of a grid (Li et al. 2022, MViTv2, 4.1; Kirillov et al. 2023,
Segment Anything, its code).
"""

import math
from typing import List, Literal, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen, Table
from posenc_export.encodings.shared.window import offset_rules, offsets, window_of


class Decomposed2D(PositionEncoding):
    """scores + q_i . a[r_i - r_j] + q_i . b[c_i - c_j], r_p = p // columns, c_p = p % columns; a, b
    trained, shared by heads.

    Tables that were trained with another grid are resized linearly, as in the code of both papers;
    tables for a grid of the same size are not changed. MViTv2's pooling, which gives keys a coarser
    grid than queries, is not included.

    Products with a and b are computed once per query and row, then gathered by offset. Memory
    besides the scores: [B,H,S,2 rows - 1 + 2 columns - 1], and two indices [B,S,T] int64.

    Args:
        geometry: head size D.
        rows, columns: size of the grid; 0 for the smallest square that holds max_positions.
        trained_rows, trained_columns: size of the grid that a and b were trained with; 0 for rows
            and columns.
        scores: "unscaled", as the code of both, adds the products with a and b unchanged; "scaled",
            as the paper, divides them by sqrt(D), like the products of queries and keys.

    Weights:
        of_rows, of_columns: a [2 trained_rows - 1,D] and b [2 trained_columns - 1,D], offsets query
            less key ascending; rel_pos_h and rel_pos_w of checkpoints.
    """

    shared = False
    least = {"rows": 0, "columns": 0, "trained_rows": 0, "trained_columns": 0}
    most = {"rows": 4096, "columns": 4096, "trained_rows": 4096, "trained_columns": 4096}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: List[Tensor]) -> Tensor:
        """As in PositionEncoding, without states."""
        queries = (q.to(torch.float32) * (scale if self.scaled else 1.0)).transpose(1, 2)
        down, right = offsets(seen.positions, seen.key_positions, self.rows, self.columns)
        along_rows = queries @ self.resize_rows(self.of_rows).t()  # [B,H,S,2 rows - 1]
        along_columns = queries @ self.resize_columns(self.of_columns).t()
        content = ops.pick(along_rows, down.unsqueeze(1))
        content = content + ops.pick(along_columns, right.unsqueeze(1))
        return ops.attend(q, seen.keys, seen.values, seen.mask, content, scale)

    def row_rules(self) -> List[str]:
        return offset_rules(self.rows, self.columns)

    def __init__(
        self,
        geometry: Geometry,
        rows: int = 0,
        columns: int = 0,
        trained_rows: int = 0,
        trained_columns: int = 0,
        scores: Literal["unscaled", "scaled"] = "unscaled",
    ) -> None:
        super().__init__()
        self.rows, self.columns = self.window = window_of("decomposed_2d", geometry, rows, columns)
        self.scaled, size = scores == "scaled", geometry.head_size
        self.resize_rows = Resized(trained_rows or self.rows, self.rows)
        self.resize_columns = Resized(trained_columns or self.columns, self.columns)
        # Of unit length, so that scores differ before training.
        self.of_rows, self.of_columns = (
            torch.nn.Parameter(torch.randn(2 * side - 1, size) / math.sqrt(size))
            for side in (trained_rows or self.rows, trained_columns or self.columns)
        )


class Resized(torch.nn.Module):
    """Rows of offsets of one side, [2 trained - 1,D], interpolated to [2 count - 1,D] float32: row
    n is at (n + 1/2) (2 trained - 1) / (2 count - 1) - 1/2, at least 0 (linear interpolation of
    torch, with align_corners=False).
    """

    def __init__(self, trained: int, count: int) -> None:
        super().__init__()
        self.same = trained == count
        rows, step = 2 * count - 1, (2 * trained - 1) / (2 * count - 1)
        places = np.maximum((np.arange(rows) + 0.5) * step - 0.5, 0.0)
        below = np.floor(places).astype(np.int64)
        self.below: Tensor
        self.above: Tensor
        self.register_buffer("below", torch.from_numpy(below), persistent=False)
        above = np.minimum(below + 1, 2 * trained - 2)
        self.register_buffer("above", torch.from_numpy(above), persistent=False)
        self.shares = Table((places - below)[:, None])

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.to(torch.float32)
        if self.same:
            return rows
        below, above = rows.index_select(0, self.below), rows.index_select(0, self.above)
        return below + self.shares.rows * (above - below)


class Decomposed2DOracle(Oracle, of=Decomposed2D):
    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        e = self.encoding
        sides: Tuple[int, int] = (e.rows, e.columns)
        points = zip(divmod(query, e.columns), divmod(key, e.columns), strict=True)
        terms = [
            q @ self.row(table, side, of_query - of_key)
            for table, side, (of_query, of_key) in zip(
                ("of_rows", "of_columns"), sides, points, strict=True
            )
        ]
        return float(sum(terms)) * (len(q) ** -0.5 if e.scaled else 1.0)

    def row(self, name: str, side: int, offset: int) -> np.ndarray:
        """The row [D] of an offset query less key, between rows of the trained table."""
        table = self.weights[name]
        step = len(table) / (2 * side - 1)
        place = max((offset + side - 0.5) * step - 0.5, 0.0)
        share, below = math.modf(place)
        above = min(int(below) + 1, len(table) - 1)
        return np.asarray((1 - share) * table[int(below)] + share * table[above])
