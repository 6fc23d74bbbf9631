"""Attention with linear biases (Press et al. 2021, Train Short, Test Long, 3 and its published slopes)."""

import math
from typing import Optional

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table

ADDED = ("after", "before")


class ALiBi(PositionEncoding):
    """scores - scale m_h |i - j|, m_h = 2^(-max_bias h / n), h = 1 .. n of the first n = heads heads, m_h = 0 of the others.

    A count n that is no power of two takes the slopes of the power below it, then every other slope of twice that power (the authors' code). MPT writes
    this list in another way; its order is the same. Causal and symmetric attention differ in the block's mask only.

    Hook: bias. State: none. Range: 0 .. max_positions - 1. The paper counts positions from 1, which changes no score.

    Args:
        geometry: heads H, any count; head size D.
        max_bias: exponent of the smallest slope; 8 in the paper, alibi_bias_max of MPT.
        scale: factor on all slopes; 1 in the paper.
        heads: number n of heads that have a slope, the first of the H; all where 0.
        added: "after" adds the bias to q k / sqrt(D) as the paper, "before" to q k, so that the bias too is divided by sqrt(D), as in Falcon.

    Raises:
        ValueError: max_bias or scale not above 0, more heads than there are, an unknown place.
    """

    def __init__(self, geometry: Geometry, max_bias: float = 8.0, scale: float = 1.0, heads: int = 0, added: str = "after") -> None:
        super().__init__()
        for name, value in (("max_bias", max_bias), ("scale", scale)):
            if not value > 0:
                raise ValueError(f"alibi: {name} is above 0, got {value}")
        if not 0 <= heads <= geometry.heads:
            raise ValueError(f"alibi: heads is 0 .. {geometry.heads}, the heads of the attention, got {heads}; set heads=0 for all")
        if added not in ADDED:
            raise ValueError(f"alibi: added is one of {', '.join(ADDED)}, got {added!r}")
        self.max_bias, self.heads, self.causal = float(max_bias), heads or geometry.heads, geometry.causal
        self.scale = float(scale) / (math.sqrt(geometry.head_size) if added == "before" else 1.0)
        below = 2 ** int(math.log2(self.heads))
        exponents = np.concatenate((np.arange(1, below + 1) / below, np.arange(1, 2 * below, 2) / (2 * below)))[: self.heads]
        slopes = np.zeros(geometry.heads)
        slopes[: self.heads] = self.scale * 2.0 ** (-self.max_bias * exponents)
        self.slopes = Table(slopes)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32; where causal, right for keys up to the query."""
        distances = ops.distances(q_positions, k_positions)
        if not self.causal:  # a causal block hides keys ahead, and behind the query -abs(j - i) is j - i
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
