"""Complex-valued word embeddings, one wave per word and dimension (Wang et al. 2020, Encoding
Word Order in Complex Embeddings, 2).
"""

import cmath
import math

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding


class ComplexOrder(PositionEncoding):
    """Word j at position p: r_jk exp(i (w_jk p + t_jk)), k = 1 .. E/2, real parts before imaginary
    parts.

    The token table holds r, w and t of every word, so the encoding needs token ids and a head that
    is not tied to the table. Angles w p are computed in float64, so far positions are as exact as
    near ones. In float16 the table and thus the frequencies have 11 significant bits, which changes
    the output at far positions.

    Args:
        geometry: width E, even.
        base: initial frequencies are base^(-2k/E), as in the sinusoid.
    """

    above = {"base": 1}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,token_width] of the token table, positions [B,S] int64 to [B,S,E]."""
        amplitude, frequency, phase = x.split(self.pairs, dim=-1)
        places = positions.unsqueeze(2).to(torch.float64)
        angle = ops.reduced_angle(places * frequency.to(torch.float64))  # [B,S,E/2]
        angle = angle + phase.to(torch.float32)
        real, imaginary = amplitude * angle.cos().to(x.dtype), amplitude * angle.sin().to(x.dtype)
        return torch.cat((real, imaginary), dim=-1)

    def __init__(self, geometry: Geometry, base: float = 10000.0) -> None:
        super().__init__()
        self.check_multiple("width", geometry.width)
        self.pairs, self.base = geometry.width // 2, float(base)

    def token_width(self, width: int) -> int:
        return 3 * self.pairs

    @torch.no_grad()
    def initialise_tokens(self, table: Tensor) -> None:
        amplitudes, frequencies, phases = table.split(self.pairs, dim=1)
        torch.nn.init.normal_(amplitudes, std=1.0)
        spread = 1 + 0.1 * torch.randn(frequencies.shape, dtype=torch.float64)
        exponents = -torch.arange(self.pairs, dtype=torch.float64) / self.pairs
        frequencies[:] = (self.base**exponents * spread).to(table.dtype)
        phases.uniform_(-math.pi, math.pi)


class ComplexOrderOracle(Oracle, of=ComplexOrder):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        numbers = zip(*np.split(x, 3), strict=True)
        waves = [r * cmath.exp(1j * (position * w + t)) for r, w, t in numbers]
        return np.array([wave.real for wave in waves] + [wave.imag for wave in waves])
