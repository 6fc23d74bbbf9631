"""Log-spaced continuous position bias of a window (Liu et al. 2022, Swin Transformer V2, 3.3)."""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table
from posenc_export.encodings.shared.window import offset_index, offset_rule, window_of
from posenc_export.shared.refusal import refusal


class SwinV2(PositionEncoding):
    """scores + 16 sigmoid(g_h(sign(d) log2(1 + 8 |d| / (n - 1)) / 3)), d the offset in rows and in
    columns, g an MLP from two numbers to H.

    Position p is at row p // columns and column p % columns of a window. n is the size of the
    window that the model was trained with, which may be smaller than the window it is used with.

    Args:
        geometry: heads H.
        rows, columns: size of the window; 0 for the smallest square that holds max_positions.
        hidden: width of the MLP's hidden layer, 512 in the paper.
        pretrained_rows, pretrained_columns: n of each axis, pretrained_window_size of a checkpoint,
            at least 2; 0 for the size of the window.

    Weights:
        first.weight, first.bias: from offsets in rows and columns to the hidden layer, [hidden,2]
            and [hidden].
        second.weight: from the hidden layer to heads, [H,hidden].
    """

    least = {"rows": 0, "columns": 0, "hidden": 1}
    most = {"rows": 4096, "columns": 4096, "hidden": 4096}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        weight, bias = self.first.weight.to(torch.float32), self.first.bias.to(torch.float32)
        inner = torch.relu(torch.nn.functional.linear(self.offsets.rows, weight, bias))
        scores = torch.nn.functional.linear(inner, self.second.weight.to(torch.float32))
        table = 16 * torch.sigmoid(scores)
        index = offset_index(q_positions, k_positions, self.rows, self.columns)
        return torch.nn.functional.embedding(index, table).permute(0, 3, 1, 2)

    def row_rules(self) -> list[str]:
        return [offset_rule(self.rows, self.columns)]

    def __init__(
        self,
        geometry: Geometry,
        rows: int = 0,
        columns: int = 0,
        hidden: int = 32,
        pretrained_rows: int = 0,
        pretrained_columns: int = 0,
    ) -> None:
        super().__init__()
        self.rows, self.columns = self.window = window_of("swin_v2", geometry, rows, columns)
        pretrained = {"pretrained_rows": pretrained_rows, "pretrained_columns": pretrained_columns}
        for name, size in pretrained.items():
            if size < 0 or size == 1:
                rule = f"{name} to be 0 or at least 2"
                raise refusal("swin_v2", rule, size, f"set {name}=0 for the size of the window")
        self.spans = (pretrained_rows or self.rows) - 1, (pretrained_columns or self.columns) - 1
        down, right = _spaced(self.rows, self.spans[0]), _spaced(self.columns, self.spans[1])
        offsets = np.stack(np.broadcast_arrays(down[:, None], right[None]), axis=-1)
        self.offsets = Table(offsets.reshape(-1, 2))
        self.first = torch.nn.Linear(2, hidden)
        self.second = torch.nn.Linear(hidden, geometry.heads, bias=False)
        torch.nn.init.normal_(self.second.weight, std=1.0)  # so that scores differ before training


def _spaced(count: int, span: int) -> np.ndarray:
    """Log-spaced offsets sign(d) log2(1 + 8 |d| / span) / 3 for d = -(count - 1) .. count - 1."""
    offsets = np.arange(1 - count, count, dtype=np.float64)
    return np.sign(offsets) * np.log2(1 + 8 * np.abs(offsets) / max(span, 1)) / 3


class SwinV2Oracle(Oracle, of=SwinV2):
    def bias(self, head: int, query: int, key: int) -> float:
        (i, m), (j, n) = divmod(query, self.encoding.columns), divmod(key, self.encoding.columns)
        x = [
            math.copysign(math.log2(1 + 8 * abs(d) / max(span, 1)) / 3, d)
            for d, span in zip((i - j, m - n), self.encoding.spans, strict=True)
        ]
        first, offset, second = self.weights.values()
        inner = np.maximum(0.0, first @ x + offset)
        return 16 / (1 + math.exp(-float(second[head] @ inner)))
