"""Decomposed relative positions of a grid (Li et al. 2022, MViTv2, 4.1; Kirillov et al. 2023,
Segment Anything, its code).
"""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen
from posenc_export.encodings.shared.window import offset_rules, offsets, window_of


class Decomposed2D(PositionEncoding):
    """scores + q_i . a[r_i - r_j] + q_i . b[c_i - c_j], r_p = p // columns, c_p = p % columns; a, b
    trained, shared by heads.

    If a table was trained with another grid, resize it before it is loaded, by
    torch.nn.functional.interpolate(table.T[None], 2 * rows - 1, mode="linear")[0].T. The code of
    both papers does this in every call. MViTv2's pooling, which gives keys a coarser grid than
    queries, is not included.

    The products with a and b are not divided by sqrt(D), as in the code of both papers; the text of
    MViTv2 divides them. They are computed once per query and row, then gathered by offset. Memory
    besides the scores: [B,H,S,2 rows - 1 + 2 columns - 1], and two indices [B,S,T] int64.

    Args:
        geometry: head size D.
        rows, columns: size of the grid; 0 for the smallest square that holds max_positions.

    Weights:
        of_rows, of_columns: a [2 rows - 1,D] and b [2 columns - 1,D], offsets query less key
            ascending; rel_pos_h and rel_pos_w of checkpoints.
    """

    shared = False
    least = {"rows": 0, "columns": 0}
    most = {"rows": 4096, "columns": 4096}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding, without states."""
        queries = q.to(torch.float32).transpose(1, 2)
        down, right = offsets(seen.positions, seen.key_positions, self.rows, self.columns)
        along_rows = queries @ self.of_rows.to(torch.float32).t()  # [B,H,S,2 rows - 1]
        along_columns = queries @ self.of_columns.to(torch.float32).t()
        content = ops.pick(along_rows, down.unsqueeze(1))
        content = content + ops.pick(along_columns, right.unsqueeze(1))
        return ops.attend(q, seen.keys, seen.values, seen.mask, content, scale)

    def row_rules(self) -> list[str]:
        return offset_rules(self.rows, self.columns)

    def __init__(self, geometry: Geometry, rows: int = 0, columns: int = 0) -> None:
        super().__init__()
        self.rows, self.columns = self.window = window_of("decomposed_2d", geometry, rows, columns)
        size = geometry.head_size
        # Of unit length, so that scores differ before training.
        self.of_rows, self.of_columns = (
            torch.nn.Parameter(torch.randn(2 * side - 1, size) / math.sqrt(size))
            for side in self.window
        )


class Decomposed2DOracle(Oracle, of=Decomposed2D):
    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        e, w = self.encoding, self.weights
        points = zip(divmod(query, e.columns), divmod(key, e.columns), strict=True)
        down, right = (of_query - of_key for of_query, of_key in points)
        row = w["of_rows"][down + e.rows - 1] + w["of_columns"][right + e.columns - 1]
        return float(q @ row)
