"""Sandwich: the inner product of two sinusoids as a bias (Chi et al. 2023, Dissecting
Transformer Length Extrapolation, 5).
"""

import math
from typing import Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared import sinusoids
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Rows, Table


class Sandwich(PositionEncoding):
    """scores + (sum_k cos((i - j) w_k) - dims / 2) / r_h, w_k = base^(-2k/dims), r_h = 8h/H, h = 1
    .. H; the bias is 0 for the query's own key, below 0 elsewhere.

    The paper adds the inner product of two sinusoidal encodings of dims entries, divided by the
    head's compression ratio r_h. The constant dims / 2 has no effect on softmax and keeps scores
    small. The sum over k is a table over distances, computed in float64.

    Scores depend on distances only.

    Args:
        geometry: heads H.
        dims: entries of the sinusoid, even.
        base: base of the frequencies.
    """

    above = {"base": 1}
    least = {"dims": 2}
    most = {"dims": 1 << 16}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        last = self.sums.rows.size(0) - 1
        distances = ops.distances(q_positions, k_positions).abs().clamp(max=last).to(torch.int64)
        sums = torch.nn.functional.embedding(distances, self.sums.rows).squeeze(4)  # [B,1,S,T]
        return sums * self.ratios.rows.view(-1, 1, 1)

    def formulas(self) -> Mapping[str, Rows]:
        waves = sinusoids.frequencies(self.dims, self.base)
        return {"sums": lambda positions: sum(np.cos(positions * w) for w in waves) - self.dims / 2}

    def __init__(self, geometry: Geometry, dims: int = 128, base: float = 10000.0) -> None:
        super().__init__()
        self.check_multiple("dims", dims, 2, "set dims=N")
        self.dims, self.base, self.heads = dims, float(base), geometry.heads
        self.sums = self.filled("sums", geometry.max_positions)
        self.ratios = Table(geometry.heads / (8 * np.arange(1, geometry.heads + 1)))


class SandwichOracle(Oracle, of=Sandwich):
    def bias(self, head: int, query: int, key: int) -> float:
        e = self.encoding
        of_query, of_key = (sinusoids.row(p, e.dims, e.base) for p in (query, key))
        product = math.fsum(of_query * of_key)
        return (product - e.dims / 2) / (8 * (head + 1) / e.heads)
