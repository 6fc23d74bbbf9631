"""Attention with linear biases (Press et al. 2021, Train Short, Test Long, 3 and its published slopes)."""

import math
from typing import Optional

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table

ADDED = ("after", "before")


class ALiBi(PositionEncoding):
    """scores - scale m_h |i - j|, m_h = 2^(-max_bias h / n) for the first n = heads heads h = 1 .. n, m_h = 0 for the others.

    If n is not a power of two, the slopes are those of the next lower power, followed by every other slope of twice that power (the authors' code). MPT
    computes the same list in another way. Causal and bidirectional attention differ in the mask of the block only.

    Hook: bias. State: none. Range: 0 .. max_positions - 1. The paper counts positions from 1, which changes no score.

    Args:
        geometry: heads H, any count; head size D.
        max_bias: exponent of the smallest slope; 8 in the paper, alibi_bias_max of MPT.
        scale: factor on all slopes; 1 in the paper.
        heads: number n of heads with a slope, counted from the first head; 0 for all heads.
        added: "after" adds the bias to q k / sqrt(D), as in the paper; "before" adds it to q k, so that it is divided by sqrt(D) too, as in Falcon.

    Raises:
        ValueError: max_bias or scale not above 0, more heads than H, an unknown value of added.
    """

    def __init__(self, geometry: Geometry, max_bias: float = 8.0, scale: float = 1.0, heads: int = 0, added: str = "after") -> None:
        super().__init__()
        for name, value in (("max_bias", max_bias), ("scale", scale)):
            if not value > 0:
                raise ValueError(f"alibi: expected {name} above 0, got {value}")
        if not 0 <= heads <= geometry.heads:
            raise ValueError(f"alibi: expected heads within 0 .. {geometry.heads}, the heads of the attention, got {heads}; set heads=0 for all")
        if added not in ADDED:
            raise ValueError(f"alibi: expected added to be one of {', '.join(ADDED)}, got {added!r}")
        self.max_bias, self.heads, self.causal = float(max_bias), heads or geometry.heads, geometry.causal
        self.scale = float(scale) / (math.sqrt(geometry.head_size) if added == "before" else 1.0)
        below = 2 ** int(math.log2(self.heads))
        exponents = np.concatenate((np.arange(1, below + 1) / below, np.arange(1, 2 * below, 2) / (2 * below)))[: self.heads]
        slopes = np.zeros(geometry.heads)
        slopes[: self.heads] = self.scale * 2.0 ** (-self.max_bias * exponents)
        self.slopes = Table(slopes)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32; if causal, entries of keys after the query are arbitrary."""
        distances = ops.distances(q_positions, k_positions)
        if not self.causal:  # a causal mask hides later keys, and for earlier keys -|j - i| is j - i
            distances = -distances.abs()
        return distances * self.slopes.rows.view(-1, 1, 1)

    def oracle(self) -> Oracle:
        return ALiBiOracle(self.heads, self.max_bias, self.scale)


class ALiBiOracle(Oracle):
    def __init__(self, heads: int, max_bias: float, scale: float) -> None:
        self.heads, self.max_bias, self.scale = heads, max_bias, scale

    def slope(self, head: int) -> float:
        below = 1
        while 2 * below <= self.heads:
            below *= 2
        if head < below:
            return math.exp2(-self.max_bias * (head + 1) / below)
        return math.exp2(-self.max_bias * (2 * (head - below) + 1) / (2 * below))

    def bias(self, head: int, query: int, key: int) -> float:
        return -self.slope(head) * self.scale * abs(query - key) if head < self.heads else 0.0
