"""Base of RoPE and its scalings: pairs rotated by position times frequency, from tables; the oracle uses complex numbers in float64."""

import cmath
import math
from typing import List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table

LAYOUTS = ("half", "interleaved")
NUMERICS = ("exact", "transformers")


def check_choice(name: str, parameter: str, value: str, choices: Tuple[str, ...]) -> None:
    """Raise ValueError if value is not one of choices."""
    if value not in choices:
        raise ValueError(f"{name}: expected {parameter} to be one of {', '.join(choices)}, got {value!r}")


def rotary_size(name: str, geometry: Geometry, rotary: Optional[int], least: int = 2) -> int:
    """Rotary size r: `rotary`, or the head size if None.

    Raises:
        ValueError: odd, below `least` or above the head size.
    """
    size = geometry.head_size if rotary is None else rotary
    if size % 2 or not least <= size <= geometry.head_size:
        rule = f"an even rotary size within {least} .. head size {geometry.head_size}"
        raise ValueError(f"{name}: expected {rule}, got {size}; set rotary=R or another head size")
    return size


def dtype_of(name: str, numerics: str) -> torch.dtype:
    """The dtype in which frequencies are computed: float64, or float32, as in transformers.

    Raises:
        ValueError: unknown numerics.
    """
    check_choice(name, "numerics", numerics, NUMERICS)
    return torch.float64 if numerics == "exact" else torch.float32


def inverse_powers(theta: float, size: int, dtype: torch.dtype) -> Tensor:
    """Frequencies theta^(-2k/r) [r/2], k = 0 .. r/2 - 1.

    Raises:
        ValueError: a theta that is not finite.
    """
    if not math.isfinite(theta):
        raise ValueError(f"rope: expected a finite theta, got {theta}")
    return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=dtype) / size))


class Rotary(PositionEncoding):
    """Pairs of queries and keys are rotated by p w_k and scaled by a magnitude.

    Subclasses pass w_k as a vector, and compute each w_k again as a scalar in `frequency`, for the oracle.

    Args:
        geometry: max_positions.
        frequencies: w_k [r/2] float64; float32 to compute angles in float32, as transformers does.
        layout: "half" for pairs (k, k + r/2), "interleaved" for pairs (2k, 2k + 1).
        magnitude: factor on cos and sin.

    Raises:
        ValueError: a magnitude that is not above 0 and finite.
    """

    def __init__(self, geometry: Geometry, frequencies: Tensor, layout: str, magnitude: float = 1.0) -> None:
        super().__init__()
        if not 0 < magnitude < math.inf:
            raise ValueError(f"rope: expected attention_factor above 0 and finite, got {magnitude}")
        self.interleaved, self.size, self.magnitude = layout == "interleaved", 2 * len(frequencies), magnitude
        self.single = frequencies.tolist() if frequencies.dtype == torch.float32 else []
        self.linear = not self.single  # angles rounded to float32 are not proportional to the position
        angles = torch.arange(geometry.max_positions, dtype=frequencies.dtype)[:, None] * frequencies
        self.cos, self.sin = Table((angles.cos() * magnitude).numpy()), Table((angles.sin() * magnitude).numpy())

    def frequency(self, k: int) -> float:
        """The frequency w_k of pair k, float64."""
        return 0.0

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        return ops.rotate_both(q, k, positions, self.cos.rows, self.sin.rows, self.interleaved, self.linear)

    def oracle(self) -> Oracle:
        frequencies = self.single or [self.frequency(k) for k in range(self.size // 2)]
        return RotaryOracle(frequencies, self.interleaved, self.magnitude, bool(self.single))


class RotaryOracle(Oracle):
    def __init__(self, frequencies: List[float], interleaved: bool, magnitude: float, single: bool) -> None:
        self.frequencies, self.interleaved, self.magnitude, self.single = frequencies, interleaved, magnitude, single

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        out, pairs = x.copy(), len(self.frequencies)
        for k, frequency in enumerate(self.frequencies):
            a, b = (2 * k, 2 * k + 1) if self.interleaved else (k, k + pairs)
            angle = float(np.float32(position) * np.float32(frequency)) if self.single else position * frequency
            turned = self.magnitude * complex(x[a], x[b]) * cmath.exp(1j * angle)
            out[a], out[b] = turned.real, turned.imag
        return out
