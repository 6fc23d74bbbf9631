"""Rotary position embedding (Su et al. 2021, RoFormer, 3.2 and 3.4.2)."""

import cmath
from typing import Optional, Tuple

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table

LAYOUTS = ("half", "interleaved")


class RoPE(PositionEncoding):
    """Pair k of every query and key head turned by p w_k, w_k = theta^(-2k/r); the last D - r entries stay.

    Hook: rotate. State: none. Range: 0 .. max_positions - 1. Scores depend on the difference of positions only.

    Args:
        geometry: head size D.
        theta: ratio of the longest wavelength to 2 pi.
        layout: "half" pairs (k, k + r/2) as LLaMA in transformers, "interleaved" pairs (2k, 2k + 1) as the paper.
        rotary: rotary size r, even, at most D; all of D where not given.

    Raises:
        ValueError: odd or too large rotary size, unknown layout, theta not above 0.
    """

    def __init__(self, geometry: Geometry, theta: float = 10000.0, layout: str = "half", rotary: Optional[int] = None) -> None:
        super().__init__()
        size = geometry.head_size if rotary is None else rotary
        if size % 2 or not 2 <= size <= geometry.head_size:
            raise ValueError(f"rope: rotary size is even and 2 .. head size {geometry.head_size}, got {size}; set rotary=R or another head size")
        if layout not in LAYOUTS:
            raise ValueError(f"rope: layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
        if not theta > 0:
            raise ValueError(f"rope: theta is above 0, got {theta}")
        self.theta, self.interleaved, self.size = float(theta), layout == "interleaved", size
        frequencies = self.theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
        angles = np.arange(geometry.max_positions, dtype=np.float64)[:, None] * frequencies
        self.cos, self.sin = Table(np.cos(angles)), Table(np.sin(angles))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        return (
            ops.rotate_pairs(q, positions, self.cos.rows, self.sin.rows, self.interleaved),
            ops.rotate_pairs(k, positions, self.cos.rows, self.sin.rows, self.interleaved),
        )

    def oracle(self) -> Oracle:
        return RoPEOracle(self)


class RoPEOracle(Oracle):
    def __init__(self, encoding: RoPE) -> None:
        self.encoding = encoding

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        size = self.encoding.size
        out = x.copy()
        for k in range(size // 2):
            a, b = (2 * k, 2 * k + 1) if self.encoding.interleaved else (k, k + size // 2)
            turned = complex(x[a], x[b]) * cmath.exp(1j * position / self.encoding.theta ** (2 * k / size))
            out[a], out[b] = turned.real, turned.imag
        return out
