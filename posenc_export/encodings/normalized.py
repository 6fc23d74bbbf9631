"""The position as a fraction of a declared length (naive form; the length is a parameter, so
that cached tokens never change).
"""

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding


class Normalized(PositionEncoding):
    """x + p / length, the same number on every entry.

    Positions of at least length give numbers of at least 1.

    Args:
        geometry: max_positions.
        length: length in tokens; 0 for max_positions. It is fixed, because the length of the
            sequence so far would change past tokens at decode.
    """

    least = {"length": 0}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        wide, places = x.to(torch.float32), positions.clamp(min=0).to(torch.float32)
        return (wide + (places / self.length).unsqueeze(2)).to(x.dtype)

    def __init__(self, geometry: Geometry, length: int = 0) -> None:
        super().__init__()
        self.length = length or geometry.max_positions


class NormalizedOracle(Oracle, of=Normalized):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        return x + position / self.encoding.length
