"""Log-spaced continuous position bias of a window (Liu et al. 2022, Swin Transformer V2, 3.3)."""

import math
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table


class SwinV2(PositionEncoding):
    """scores + 16 sigmoid(g_h(sign(d) log2(1 + 8 |d| / (n - 1)) / 3)), d the offset in rows and in columns, g an MLP from two numbers to H.

    Position p stands at row p // columns and column p % columns of a window.

    Hook: bias. State: none. Range: 0 .. max_positions - 1, all inside the window.

    Args:
        geometry: heads H.
        rows, columns: of the window, n above; where 0, the smallest square that holds max_positions.
        hidden: width of the MLP's hidden layer, 512 in the paper.

    Raises:
        ValueError: a window that does not hold max_positions, a width below 1.
    """

    def __init__(self, geometry: Geometry, rows: int = 0, columns: int = 0, hidden: int = 32) -> None:
        super().__init__()
        side = math.isqrt(geometry.max_positions - 1) + 1
        self.rows, self.columns = rows or side, columns or side
        if self.rows * self.columns < geometry.max_positions or hidden < 1:
            raise ValueError(f"swin_v2: the window holds max_positions {geometry.max_positions} and hidden is at least 1, got {rows} x {columns} and {hidden}")
        down, right = (_spaced(n) for n in (self.rows, self.columns))
        self.offsets = Table(np.stack(np.broadcast_arrays(down[:, None], right[None]), axis=-1).reshape(-1, 2))
        self.first, self.second = torch.nn.Linear(2, hidden), torch.nn.Linear(hidden, geometry.heads, bias=False)
        torch.nn.init.normal_(self.second.weight, std=1.0)  # so that scores differ before training

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        inner = torch.relu(torch.nn.functional.linear(self.offsets.rows, self.first.weight.to(torch.float32), self.first.bias.to(torch.float32)))
        table = 16 * torch.sigmoid(torch.nn.functional.linear(inner, self.second.weight.to(torch.float32)))
        q, k = q_positions.clamp(min=0).unsqueeze(2), k_positions.clamp(min=0).unsqueeze(1)
        down = torch.div(q, self.columns, rounding_mode="floor") - torch.div(k, self.columns, rounding_mode="floor") + (self.rows - 1)
        right = torch.remainder(q, self.columns) - torch.remainder(k, self.columns) + (self.columns - 1)
        index = (down * (2 * self.columns - 1) + right).clamp(0, table.size(0) - 1)
        return torch.nn.functional.embedding(index, table).permute(0, 3, 1, 2)

    def oracle(self) -> Oracle:
        return SwinV2Oracle(self)


def _spaced(count: int) -> np.ndarray:
    """Offsets -(count - 1) .. count - 1, log-spaced into -1 .. 1."""
    offsets = np.arange(1 - count, count, dtype=np.float64)
    return np.sign(offsets) * np.log2(1 + 8 * np.abs(offsets) / max(count - 1, 1)) / 3


class SwinV2Oracle(Oracle):
    def __init__(self, encoding: SwinV2) -> None:
        self.rows, self.columns = encoding.rows, encoding.columns
        self.weights = [value.detach().double().numpy() for value in (encoding.first.weight, encoding.first.bias, encoding.second.weight)]

    def bias(self, head: int, query: int, key: int) -> float:
        (i, m), (j, n) = divmod(query, self.columns), divmod(key, self.columns)
        x = [math.copysign(math.log2(1 + 8 * abs(d) / max(size - 1, 1)) / 3, d) for d, size in ((i - j, self.rows), (m - n, self.columns))]
        first, offset, second = self.weights
        inner = [max(0.0, first[c, 0] * x[0] + first[c, 1] * x[1] + offset[c]) for c in range(len(offset))]
        return 16 / (1 + math.exp(-sum(second[head, c] * value for c, value in enumerate(inner))))
