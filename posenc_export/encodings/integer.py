"""The position itself as a number (the naive form that Vaswani et al. 2017 replaced)."""

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.shared.refusal import refusal

EXACT = 1 << 24  # whole numbers up to here are exact in float32


class Integer(PositionEncoding):
    """x + p, the same number on every entry.

    Range: 0 .. max_positions - 1, at most 2^24. In float16 sums are rounded to 11 significant bits
    and overflow above 65504.

    Args:
        geometry: max_positions.
    """

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        wide = x.to(torch.float32)
        return (wide + positions.clamp(min=0).to(torch.float32).unsqueeze(2)).to(x.dtype)

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        if geometry.max_positions > EXACT:
            limit = "2^24, the largest exact range of integers in float32"
            rule = f"max_positions up to {limit}"
            raise refusal("integer", rule, geometry.max_positions, "choose sinusoidal or rope")


class IntegerOracle(Oracle, of=Integer):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        return x + position
