"""Scores that come back with a period (made for these tests)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings import Geometry, Oracle, PositionEncoding, Table

PERIOD = 24


class Cosine(PositionEncoding):
    """scores + (h + 1) cos(2 pi (i - j) / period) / H.

    Hook: bias. State: none. Range: 0 .. max_positions - 1.
    """

    def __init__(self, geometry: Geometry, period: int = PERIOD) -> None:
        super().__init__()
        if period < 2:
            raise ValueError(f"cosine: expected a period of at least 2 tokens, got {period}; set period=N")
        self.period = period
        self.heads = geometry.heads
        self.heights = Table((np.arange(geometry.heads) + 1)[:, None, None] / geometry.heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        turn = torch.remainder(q_positions[:, None, :, None] - k_positions[:, None, None, :], self.period)
        return self.heights.rows * torch.cos(turn.to(torch.float32) * (2 * math.pi / self.period))

    def oracle(self) -> Oracle:
        return CosineOracle(self.period, self.heads)


class CosineOracle(Oracle):
    def __init__(self, period: int, heads: int) -> None:
        self.period, self.heads = period, heads

    def bias(self, head: int, query: int, key: int) -> float:
        return (head + 1) * math.cos(2 * math.pi * (query - key) / self.period) / self.heads
