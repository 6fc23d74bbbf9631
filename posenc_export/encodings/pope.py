"""Polar coordinate positional embedding: content in magnitudes, position in phases
(Gopalakrishnan et al. 2025, PoPE, 3).
"""

import cmath
import math
from typing import Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Exact, Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.oracles import Rows
from posenc_export.encodings.shared.rotary import waves_of
from posenc_export.encodings.shared.tables import wave_tables


class PoPE(PositionEncoding):
    """scores sum_c softplus(q_c) softplus(k_c) cos((i - j) w_c - d_c) / sqrt(D), w_c =
    theta^(-c/D), d_c in 0 .. 2 pi, trained per head.

    Every entry of a head becomes a vector in the plane with its own frequency. Queries rotated by i
    w_c - d_c and keys rotated by j w_c have 2D entries.

    Cached keys have 2D entries.

    Args:
        geometry: head size D, heads.
        theta: base of the frequencies.
    """

    shared = False
    above = {"theta": 0}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to [B,S,H,2D], [B,S,K,2D]."""
        of_q = torch.nn.functional.softplus(q.to(torch.float32))
        of_k = torch.nn.functional.softplus(k.to(torch.float32))
        phase = self.phase().clamp(0.0, 2 * math.pi)
        turned_q, turned_k = ops.rotate_both(
            torch.cat((of_q * phase.cos(), -of_q * phase.sin()), dim=-1),
            torch.cat((of_k, torch.zeros_like(of_k)), dim=-1),
            positions,
            self.cos.rows,
            self.sin.rows,
            False,
        )
        return turned_q.to(q.dtype), turned_k.to(k.dtype)

    def formulas(self) -> Mapping[str, Rows]:
        return waves_of(lambda positions: positions * self.frequencies)

    def __init__(self, geometry: Geometry, theta: float = 10000.0) -> None:
        super().__init__()
        self.theta = float(theta)
        self.frequencies = self.theta ** (-np.arange(geometry.head_size) / geometry.head_size)
        self.cos, self.sin = wave_tables(self.frequencies.tolist(), geometry.max_positions)
        self.phase = Exact(2 * math.pi * torch.rand(geometry.heads, geometry.head_size))

    def key_size(self, head_size: int) -> int:
        return 2 * head_size


class PoPEOracle(Oracle, of=PoPE):
    """Computes the vectors in the plane as complex numbers; real parts come first."""

    def rotated(self, x: np.ndarray, position: int, phase: np.ndarray) -> np.ndarray:
        """Rotate x [D] to [2D]."""
        vectors = []
        for c, value in enumerate(x):
            angle = position / math.pow(self.encoding.theta, c / len(x))
            angle -= min(max(phase[c], 0.0), 2 * math.pi)
            vectors.append(math.log1p(math.exp(value)) * cmath.exp(1j * angle))
        return np.array([v.real for v in vectors] + [v.imag for v in vectors])

    def rotate_heads(self, x: np.ndarray, position: int) -> np.ndarray:
        phases = self.weights["phase.value"]
        return np.stack([self.rotated(x[h], position, phases[h]) for h in range(len(x))])

    def rotate_key(self, x: np.ndarray, position: int) -> np.ndarray:
        return self.rotated(x, position, np.zeros(len(x)))

    def score_scale(self, head_size: int) -> float:
        """1 / sqrt(D), where head_size is 2D."""
        return math.sqrt(2 / head_size)
