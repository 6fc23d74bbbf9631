"""Multiplicative positions (Dufter et al. 2021, Position Information in Transformers, 3.1)."""

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding


class Multiplicative(PositionEncoding):
    """x * P[p], P trained, initialised around 1.

    Args:
        geometry: width E, max_positions.
    """

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        return x * self.factors(positions.clamp(min=0)).to(x.dtype)

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.factors = torch.nn.Embedding(geometry.max_positions, geometry.width)
        torch.nn.init.normal_(self.factors.weight, mean=1.0, std=0.2)


class MultiplicativeOracle(Oracle, of=Multiplicative):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        return x * self.weights["factors.weight"][position]
