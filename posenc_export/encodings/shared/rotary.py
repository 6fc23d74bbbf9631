"""Base of RoPE and its scalings: pairs rotated by position times frequency, from tables."""

import math
from typing import Any, Dict, Literal, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Rows, Table
from posenc_export.encodings.shared.tables import wave_tables

Layout = Literal["half", "interleaved"]
COS_SIN = ("cos", "sin")
Place = Union[int, Sequence[int]]  # the position of a token, or its coordinates


def rotary_size(name: str, geometry: Geometry, rotary: Optional[int], least: int = 2) -> int:
    """Rotary size r, by default D. ValueError: odd, below `least` or above the head size."""
    size = geometry.head_size if rotary is None else rotary
    if size % 2 or not least <= size <= geometry.head_size:
        rule = f"an even rotary size within {least} .. head size {geometry.head_size}"
        raise ValueError(f"{name}: expected {rule}, got {size}; set rotary=R or another head size")
    return size


def powers_of(theta: float, size: int) -> Tensor:
    """Frequencies theta^(-2k/r) [r/2] float64. ValueError: a theta that is not finite."""
    if not math.isfinite(theta):
        raise ValueError(f"rope: expected a finite theta, got {theta}")
    return 1.0 / (float(theta) ** (torch.arange(0, size, 2, dtype=torch.float64) / size))


class Rotation(PositionEncoding):
    """Pair k of queries and keys is rotated by n_k w_k and scaled by a magnitude; n_k is the
    position or a number in its place.

    Subclasses pass w_k as a vector, and compute each w_k again as a scalar in `frequency`, for the
    oracle.

    Args:
        geometry: max_positions.
        frequencies: w_k [r/2] float64.
        layout: "half" for pairs (k, k + r/2), "interleaved" for pairs (2k, 2k + 1).
        magnitude: factor on cos and sin.
        numbers: n_k [max_positions,r/2] float64; None for positions.

    Raises:
        ValueError: a magnitude that is not above 0 and finite.
    """

    above = {"theta": 0}

    def __init__(
        self,
        geometry: Geometry,
        frequencies: Tensor,
        layout: Layout,
        magnitude: float = 1.0,
        numbers: Optional[Tensor] = None,
    ) -> None:
        super().__init__()
        if not 0 < magnitude < math.inf:
            raise ValueError(f"rope: expected attention_factor above 0 and finite, got {magnitude}")
        self.interleaved, self.magnitude = layout == "interleaved", magnitude
        self.size = 2 * len(frequencies)
        if numbers is None:
            self.cos, self.sin = wave_tables(frequencies, geometry.max_positions, magnitude)
            return
        angles = numbers * frequencies  # [max_positions,r/2]
        self.cos = Table((angles.cos() * magnitude).numpy())
        self.sin = Table((angles.sin() * magnitude).numpy())

    def frequency(self, k: int) -> float:
        """The frequency w_k of pair k, float64."""
        return 0.0

    def number(self, k: int, place: Any) -> float:
        """The number n_k of a position."""
        return float(place)


class Rotary(Rotation):
    """Pairs rotated by p w_k and scaled by a magnitude; arguments as for Rotation."""

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        cos, sin = self.cos.rows, self.sin.rows
        return ops.rotate_both(q, k, positions, cos, sin, self.interleaved)


class RotationOracle(Oracle, of=Rotation):
    def __init__(self, encoding: Rotation) -> None:
        super().__init__(encoding)
        self.frequencies = [encoding.frequency(k) for k in range(encoding.size // 2)]

    def tables(self) -> Mapping[str, Rows]:
        e = self.encoding
        return waves_of(self.frequencies, e.magnitude, numbers=self.numbers)

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """The numbers n_k of positions [n,1], [n,1 or r/2]."""
        return positions

    def rotate(self, x: np.ndarray, position: Place) -> np.ndarray:
        e = self.encoding
        numbers = [e.number(k, position) for k in range(e.size // 2)]
        angles = np.array(numbers) * self.frequencies
        return multiply_pairs(x, e.magnitude * np.exp(1j * angles), e.interleaved)


def waves_of(
    frequencies: Sequence[float],
    magnitude: float = 1.0,
    names: Sequence[str] = COS_SIN,
    numbers: Rows = np.asarray,
) -> Dict[str, Rows]:
    """State tables of cosines and sines. numbers: the numbers n_k of positions;
    the positions themselves by default.
    """

    def angles(positions: np.ndarray) -> np.ndarray:
        return numbers(positions) * np.array(frequencies)

    cos, sin = names
    return {
        cos: lambda positions: magnitude * np.cos(angles(positions)),
        sin: lambda positions: magnitude * np.sin(angles(positions)),
    }


def multiply_pairs(x: np.ndarray, factors: Any, interleaved: bool) -> np.ndarray:
    """x [D] with each pair, as a complex number, times its factor [pairs]; for oracles."""
    out, pairs = x.copy(), len(factors)
    for k, factor in enumerate(factors):
        a, b = (2 * k, 2 * k + 1) if interleaved else (k, k + pairs)
        wave = complex(x[a], x[b]) * factor
        out[a], out[b] = wave.real, wave.imag
    return out
