"""Attention with linear biases (Press et al. 2021, Train Short, Test Long, 3 and its published
slopes).
"""

import math

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table
from posenc_export.shared.refusal import refusal


class ALiBi(PositionEncoding):
    """scores - scale m_h |i - j|; m_h = 2^(-max_bias h / n) for heads h = 1 .. n, m_h = 0 for the
    others.

    If n is not a power of two, the slopes are those of the next lower power, followed by every
    other slope of twice that power (the authors' code). MPT computes the same list in another way.
    Causal and bidirectional attention differ only in the block's mask.

    The paper counts positions from 1, which changes no score.

    Args:
        geometry: heads H, any count; head size D.
        max_bias: exponent of the smallest slope; 8 in the paper, alibi_bias_max of MPT.
        scale: factor on all slopes; 1 in the paper.
        heads: number n of heads with a slope, counted from the first head, at most H; 0 for
            all heads.
    """

    above = {"max_bias": 0, "scale": 0}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """Return biases [B,H,S,T] float32; if causal, those of later keys are arbitrary."""
        bias = ops.distances(q_positions, k_positions) * self.slopes.rows.view(-1, 1, 1)
        # Distances are j - i: below 0 for earlier keys, and a causal mask hides later ones.
        return bias if self.causal else -bias.abs()

    def bias_rule(self) -> str:
        return "-abs(q - k)"

    def __init__(
        self, geometry: Geometry, max_bias: float = 8.0, scale: float = 1.0, heads: int = 0
    ) -> None:
        super().__init__()
        if not 0 <= heads <= geometry.heads:
            rule = f"heads within 0 .. {geometry.heads}, the heads of the attention"
            raise refusal("alibi", rule, heads, "set heads=0 for all")
        self.max_bias, self.heads = float(max_bias), heads or geometry.heads
        self.causal, self.scale = geometry.causal, float(scale)
        slopes = np.zeros(geometry.heads)
        slopes[: self.heads] = _slopes(self.heads, self.max_bias)
        self.slopes = Table(self.scale * slopes)


def _slopes(count: int, max_bias: float) -> np.ndarray:
    """Return the slopes of `count` heads, as ALiBi documents them."""
    below = 2 ** int(math.log2(count))
    further = np.arange(1, 2 * below, 2) / (2 * below)
    exponents = np.concatenate((np.arange(1, below + 1) / below, further))
    return 2.0 ** (-max_bias * exponents[:count])


class ALiBiOracle(Oracle, of=ALiBi):
    def __init__(self, encoding: ALiBi) -> None:
        super().__init__(encoding)
        self.slopes = (encoding.scale * _slopes(encoding.heads, encoding.max_bias)).tolist()

    def bias(self, head: int, query: int, key: int) -> float:
        return -self.slopes[head] * abs(query - key) if head < len(self.slopes) else 0.0
