"""The position in binary, one bit per entry (the discrete precursor of the sinusoid)."""

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.shared.refusal import refusal


class Binary(PositionEncoding):
    """x + the E bits of p, the most significant bit first.

    Range: 0 .. max_positions - 1, at most 2^E.

    Args:
        geometry: width E, max_positions.
    """

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        places = positions.clamp(min=0).unsqueeze(2)
        bits = torch.remainder(torch.div(places, self.powers, rounding_mode="floor"), 2)
        return x + bits.to(x.dtype)

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        used = max(1, (geometry.max_positions - 1).bit_length())
        if used > geometry.width:
            limit = f"2^{geometry.width}, the numbers of {geometry.width} bits"
            rule = f"max_positions up to {limit}"
            raise refusal("binary", rule, geometry.max_positions, "choose a larger width")
        self.powers: Tensor
        # Clamped: entries in front are bits that no position has.
        powers = 2 ** torch.arange(geometry.width - 1, -1, -1).clamp(max=used)
        self.register_buffer("powers", powers, persistent=False)


class BinaryOracle(Oracle, of=Binary):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        digits = format(position, "b").zfill(len(x))
        return np.array([value + int(digit) for value, digit in zip(x, digits, strict=True)])
