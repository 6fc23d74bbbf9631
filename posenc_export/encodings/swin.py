"""A trained bias for each offset in rows and columns of a window (Liu et al. 2021, Swin
Transformer, 3.2, eq. 4).
"""

import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.window import offset_index, offset_rule, window_of


class Swin(PositionEncoding):
    """scores + b_h[r_i - r_j, c_i - c_j], r_p = p // columns, c_p = p % columns, b trained.

    Args:
        geometry: heads H.
        rows, columns: size of the window; 0 for the smallest square that holds max_positions.

    Weights:
        table.weight: b, [(2 rows - 1)(2 columns - 1),H], both offsets ascending, column offsets
            fastest; relative_position_bias_table of Swin.
    """

    least = {"rows": 0, "columns": 0}
    most = {"rows": 4096, "columns": 4096}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        index = offset_index(q_positions, k_positions, self.rows, self.columns)
        rows = torch.nn.functional.embedding(index, self.table.weight.to(torch.float32))
        return rows.permute(0, 3, 1, 2)

    def row_rules(self) -> list[str]:
        return [offset_rule(self.rows, self.columns)]

    def __init__(self, geometry: Geometry, rows: int = 0, columns: int = 0) -> None:
        super().__init__()
        self.rows, self.columns = self.window = window_of("swin", geometry, rows, columns)
        count = (2 * self.rows - 1) * (2 * self.columns - 1)
        # Initialised from N(0, 1), so that scores differ before training.
        self.table = torch.nn.Embedding(count, geometry.heads)


class SwinOracle(Oracle, of=Swin):
    def bias(self, head: int, query: int, key: int) -> float:
        rows, columns = self.encoding.rows, self.encoding.columns
        (i, m), (j, n) = divmod(query, columns), divmod(key, columns)
        table = self.weights["table.weight"].reshape(2 * rows - 1, 2 * columns - 1, -1)
        return float(table[rows - 1 + i - j, columns - 1 + m - n, head])
