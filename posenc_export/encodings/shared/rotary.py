"""Bases of RoPE, its scalings and rotations on grids: pairs rotated by the position, or one of
several coordinates, times a frequency, from tables.
"""

import math
from typing import Any, Literal, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table, key_of
from posenc_export.encodings.shared.oracles import Rows
from posenc_export.encodings.shared.tables import wave_tables
from posenc_export.shared.refusal import refusal

Layout = Literal["half", "interleaved"]
COS_SIN = ("cos", "sin")
Place = int | Sequence[int]  # the position of a token, or its coordinates


class Rotation(PositionEncoding):
    """Pair k of queries and keys is rotated by n_k w_k and scaled by a magnitude; n_k is the
    position or a number in its place.

    The formula of w_k is `frequency`. A subclass sets its parameters and calls `tabulate`.

    Args:
        geometry: head size D, max_positions.
        layout: "half" for pairs (k, k + r/2), "interleaved" for pairs (2k, 2k + 1).
        rotary: rotary size r; D if not given.
        least: smallest r.

    Raises:
        ValueError: a rotary size that is odd, below `least` or above the head size.
    """

    above = {"theta": 0}
    magnitude = 1.0
    theta: float

    def __init__(
        self, geometry: Geometry, layout: Layout, rotary: int | None = None, least: int = 2
    ) -> None:
        super().__init__()
        self.size = geometry.head_size if rotary is None else rotary
        if self.size % 2 or not least <= self.size <= geometry.head_size:
            rule = f"an even rotary size within {least} .. head size {geometry.head_size}"
            remedy = "set rotary=R or another head size"
            raise refusal(key_of(self), rule, self.size, remedy)
        self.interleaved, self.count = layout == "interleaved", geometry.max_positions

    def frequency(self, k: int) -> float:
        """The frequency w_k of pair k, float64, by default that of RoPE."""
        return float(self.theta ** (-2 * k / self.size))

    def numbers(self, place: Any) -> Any:
        """The numbers n_k [r/2] of a token's position or coordinates, or [n,r/2] of positions
        [n,1]. One number stands for equal ones.
        """
        return place

    def formulas(self) -> Mapping[str, Rows]:
        def angles(positions: np.ndarray) -> np.ndarray:
            frequencies = [self.frequency(k) for k in range(self.size // 2)]
            return np.asarray(self.numbers(positions) * np.array(frequencies))

        return waves_of(angles, self.magnitude)

    def tabulate(self, numbers: np.ndarray | None = None) -> None:
        """Compute cos and sin for numbers n_k [max_positions,r/2] float64, or for positions.
        ValueError: a magnitude that is not above 0 and finite.
        """
        if not 0 < self.magnitude < math.inf:
            rule = "attention_factor above 0 and finite"
            raise refusal(key_of(self), rule, self.magnitude)
        frequencies = [self.frequency(k) for k in range(self.size // 2)]
        if numbers is None:
            self.cos, self.sin = wave_tables(frequencies, self.count, self.magnitude)
        else:
            waves = self.magnitude * np.exp(1j * numbers * frequencies)
            self.cos, self.sin = Table(waves.real), Table(waves.imag)


class Rotary(Rotation):
    """Pairs rotated by p w_k and scaled by a magnitude; arguments as for Rotation."""

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        cos, sin = self.cos.rows, self.sin.rows
        return ops.rotate_both(q, k, positions, cos, sin, self.interleaved)


class RotaryGrid(Rotation):
    """Pair k is rotated by w_k times the coordinate axis_of_pair[k]. For text all coordinates of a
    token are its position.

    A subclass sets `axis_of_pair`, the axis of each of the r/2 pairs, before it calls `tabulate`.
    """

    axes = 2
    axis_of_pair: list[int]

    def tabulate(self, numbers: np.ndarray | None = None) -> None:
        super().tabulate(numbers)
        of_pair = torch.tensor(self.axis_of_pair)
        self.of_axis: Tensor
        of_axis = of_pair == torch.arange(int(of_pair.max()) + 1)[:, None]
        self.register_buffer("of_axis", of_axis, persistent=False)  # [axes,r/2]

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], coordinates [axes,B,S] int64 to the same shapes and dtypes."""
        cos, sin = self.select_axes(self.cos(positions)), self.select_axes(self.sin(positions))
        turned_q = ops.apply_rotation(q, cos, sin, self.interleaved)
        return turned_q, ops.apply_rotation(k, cos, sin, self.interleaved)

    def select_axes(self, rows: Tensor) -> Tensor:
        """Select the axis of each pair from rows [axes,B,S,r/2]: [B,S,1,r/2]."""
        selected = rows[0]
        for axis in range(1, self.of_axis.size(0)):
            selected = torch.where(self.of_axis[axis], rows[axis], selected)
        return selected.unsqueeze(2)

    def point(self, axis: int, coordinate: Any) -> Any:
        """The number in place of a coordinate, or of coordinates [n]."""
        return coordinate

    def numbers(self, place: Any) -> np.ndarray:
        of_axes = [
            np.atleast_1d(self.point(axis, place[axis] if isinstance(place, tuple) else place))
            for axis in range(self.axes)
        ]
        return np.concatenate([of_axes[axis] for axis in self.axis_of_pair], axis=-1)


class RotationOracle(Oracle, of=Rotation):
    def __init__(self, encoding: Rotation) -> None:
        super().__init__(encoding)
        self.frequencies = [encoding.frequency(k) for k in range(encoding.size // 2)]

    def rotate(self, x: np.ndarray, position: Place) -> np.ndarray:
        e = self.encoding
        angles = e.numbers(position) * np.array(self.frequencies)
        return multiply_pairs(x, e.magnitude * np.exp(1j * angles), e.interleaved)


def waves_of(
    angles: Rows, magnitude: float = 1.0, names: Sequence[str] = COS_SIN
) -> dict[str, Rows]:
    """Formulas of tables of cosines and sines of angles, a function of positions."""
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
