"""Complex-valued word embeddings, a wave per word and dimension (Wang et al. 2020, Encoding Word Order in Complex Embeddings, 3.2)."""

import cmath
import math

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding


class ComplexOrder(PositionEncoding):
    """Word j at p: r_j exp(i (w_j p + t_j)); real parts, then imaginary parts, each E/2 wide.

    The token table holds [r, w, t] of every word, 3E/2 wide, all trained: it acts on token ids, in a decoder with a head of its own.
    Angles w p are formed in float64 and reduced to one turn, so that far positions are as exact as near ones.
    In float16 the table, frequencies included, has 11 bits: far out the model is then another one.
    In float16 the table, frequencies included, has 11 bits: the model itself is then another one far out.

    Hook: embed. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: width E, even.
        base: starting frequencies are base^(-2k/E), as the sinusoid's.

    Raises:
        ValueError: odd width, base not above 1.
    """

    def __init__(self, geometry: Geometry, base: float = 10000.0) -> None:
        super().__init__()
        if geometry.width % 2:
            raise ValueError(f"complex_order: width is even, got {geometry.width}; choose an even width")
        if not base > 1:
            raise ValueError(f"complex_order: base is above 1, got {base}")
        self.pairs, self.base = geometry.width // 2, float(base)

    def token_width(self, width: int) -> int:
        return 3 * (width // 2)

    @torch.no_grad()
    def initialise_tokens(self, table: Tensor) -> None:
        torch.nn.init.normal_(table[:, : self.pairs], std=1.0)
        start = self.base ** (-torch.arange(self.pairs, dtype=torch.float64) / self.pairs)
        table[:, self.pairs : 2 * self.pairs] = (start * (1 + 0.1 * torch.randn(len(table), self.pairs, dtype=torch.float64))).to(table.dtype)
        table[:, 2 * self.pairs :].uniform_(-math.pi, math.pi)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,3E/2] of the token table, positions [B,S] int64 to [B,S,E]."""
        amplitude, frequency, phase = x.split(self.pairs, dim=-1)
        angle = ops.reduced_angle(positions.unsqueeze(2).to(torch.float64) * frequency.to(torch.float64)) + phase.to(torch.float32)
        return torch.cat((amplitude * angle.cos().to(x.dtype), amplitude * angle.sin().to(x.dtype)), dim=-1)

    def oracle(self) -> Oracle:
        return ComplexOrderOracle()


class ComplexOrderOracle(Oracle):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        half = len(x) // 3
        waves = [x[k] * cmath.exp(1j * (x[half + k] * position + x[2 * half + k])) for k in range(half)]
        return np.array([wave.real for wave in waves] + [wave.imag for wave in waves])
