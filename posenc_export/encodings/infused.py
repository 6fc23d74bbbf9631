"""Positions added to queries and keys but not to values (Press et al. 2020, Shortformer,
Position-Infused Attention; here after the projections).
"""

from typing import Mapping

import numpy as np
from torch import Tensor

from posenc_export.encodings.shared import sinusoids
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Rows


class Infused(PositionEncoding):
    """scores (q_i + p_i) . (k_j + p_j) / sqrt(D), with the same p of size D for all heads; values
    get no positions.

    p_n = [sin(n w_k), cos(n w_k)], interleaved, w_k = base^(-2k/D). Shortformer adds sinusoids
    of the model's width before the projections. Its queries and keys therefore get W p instead of
    p, and W differs for the queries and the keys of each head.

    Args:
        geometry: head size D, even.
        base: base of the frequencies.
    """

    above = {"base": 1}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        added = self.waves(positions).unsqueeze(2)
        return (q + added).to(q.dtype), (k + added).to(k.dtype)

    def formulas(self) -> Mapping[str, Rows]:
        return {"waves": sinusoids.formula(self.size, self.base)}

    def __init__(self, geometry: Geometry, base: float = 10000.0) -> None:
        super().__init__()
        self.check_multiple("head size", geometry.head_size)
        self.size, self.base = geometry.head_size, float(base)
        self.waves = self.filled("waves", geometry.max_positions)


class InfusedOracle(Oracle, of=Infused):
    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        return x + sinusoids.row(position, len(x), self.encoding.base)
