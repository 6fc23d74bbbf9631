"""Complex-valued word embeddings, one wave per word and dimension (Wang et al. 2020, Encoding
Word Order in Complex Embeddings, 2; shared tables 3.1).
"""

import cmath
import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Exact, Geometry, Oracle, PositionEncoding


class ComplexOrder(PositionEncoding):
    """Word j at position p: r_jk exp(i (w_jk p + t_jk)), k = 1 .. E/2, real parts before imaginary
    parts.

    The token table holds r, w and t of every word, so that the encoding needs token ids and an
    untied head; shared frequencies or phases (3.1) make it narrower. Angles w p are computed in
    float64, and far positions are as exact as near ones. In float16 the table, with the
    frequencies, has 11 significant bits, which changes the output at far positions.

    Args:
        geometry: width E, even.
        base: initial frequencies are base^(-2k/E), as in the sinusoid.
        frequencies: "own" w_jk for each word and dimension; "words" shares w_k between words;
            "dimensions" shares w_j between dimensions, one column of the table.
        phases: "own" t_jk for each word and dimension, or "zero".

    Weights:
        frequency.value: w_k, [E/2] float32, if frequencies is "words"; all other weights are in the
            token table.
    """

    above = {"base": 1}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,token_width] of the token table, positions [B,S] int64 to [B,S,E]."""
        amplitude, frequency, phase = x.split(self.parts, dim=-1)
        if self.frequency is not None:
            frequency = self.frequency()
        places = positions.unsqueeze(2).to(torch.float64)
        angle = ops.reduced_angle(places * frequency.to(torch.float64))  # [B,S,E/2]
        if self.parts[2] > 0:
            angle = angle + phase.to(torch.float32)
        real, imaginary = amplitude * angle.cos().to(x.dtype), amplitude * angle.sin().to(x.dtype)
        return torch.cat((real, imaginary), dim=-1)

    def __init__(
        self,
        geometry: Geometry,
        base: float = 10000.0,
        frequencies: Literal["own", "words", "dimensions"] = "own",
        phases: Literal["own", "zero"] = "own",
    ) -> None:
        super().__init__()
        self.check_multiple("width", geometry.width)
        self.pairs, self.base = geometry.width // 2, float(base)
        columns = {"own": self.pairs, "words": 0, "dimensions": 1}[frequencies]
        # Columns of amplitudes, frequencies and phases in the token table.
        self.parts = [self.pairs, columns, self.pairs if phases == "own" else 0]
        self.frequency = Exact(self._initial(self.pairs)) if frequencies == "words" else None

    def token_width(self, width: int) -> int:
        return sum(self.parts)

    @torch.no_grad()
    def initialise_tokens(self, table: Tensor) -> None:
        amplitudes, frequencies, phases = table.split(self.parts, dim=1)
        torch.nn.init.normal_(amplitudes, std=1.0)
        if frequencies.size(1):
            spread = 1 + 0.1 * torch.randn(frequencies.shape, dtype=torch.float64)
            frequencies[:] = (self._initial(frequencies.size(1)) * spread).to(table.dtype)
        phases.uniform_(-math.pi, math.pi)

    def _initial(self, count: int) -> Tensor:
        """The first initial frequencies [count], float64."""
        return self.base ** (-torch.arange(count, dtype=torch.float64) / self.pairs)


class ComplexOrderOracle(Oracle, of=ComplexOrder):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        amplitudes, frequencies, phases = np.split(x, np.cumsum(self.encoding.parts)[:2])
        shared = self.weights.get("frequency.value", frequencies)
        waves = []
        for k, amplitude in enumerate(amplitudes):
            angle = position * shared[k if len(shared) > 1 else 0]
            angle += phases[k] if len(phases) else 0.0
            waves.append(amplitude * cmath.exp(1j * angle))
        return np.array([wave.real for wave in waves] + [wave.imag for wave in waves])
