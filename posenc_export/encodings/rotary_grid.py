"""What the rotations of grids share: every pair turned by one of several coordinates."""

import cmath
from typing import List, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table

Place = Union[int, Sequence[int]]


class RotaryGrid(PositionEncoding):
    """Pair k turned by the coordinate axis_of_pair[k] times w_k. For text all coordinates of a token are its position.

    Args:
        geometry: max_positions, of every coordinate.
        frequencies: w_k [r/2] float64.
        axis_of_pair: axis of each pair, r/2 of them.
        layout: "half" or "interleaved".
    """

    axes = 2

    def __init__(self, geometry: Geometry, frequencies: np.ndarray, axis_of_pair: List[int], layout: str) -> None:
        super().__init__()
        self.interleaved, self.size, self.axis_of_pair = layout == "interleaved", 2 * len(frequencies), axis_of_pair
        angles = np.arange(geometry.max_positions)[:, None] * frequencies
        self.cos, self.sin = Table(np.cos(angles)), Table(np.sin(angles))
        self.of_axis: Tensor
        self.register_buffer("of_axis", torch.tensor(axis_of_pair)[None] == torch.arange(max(axis_of_pair) + 1)[:, None], persistent=False)

    def frequency(self, k: int) -> float:
        """w_k of pair k, float64."""
        return 0.0

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], coordinates [axes,B,S] int64 to the same shapes and dtypes."""
        cos, sin = self.own(self.cos(positions)), self.own(self.sin(positions))
        return ops.turn_pairs(q, cos, sin, self.interleaved), ops.turn_pairs(k, cos, sin, self.interleaved)

    def own(self, rows: Tensor) -> Tensor:
        """Of rows [axes,B,S,r/2] each pair's own axis: [B,S,1,r/2]."""
        found = rows[0]
        for axis in range(1, self.of_axis.size(0)):
            found = torch.where(self.of_axis[axis], rows[axis], found)
        return found.unsqueeze(2)

    def oracle(self) -> Oracle:
        return RotaryGridOracle([self.frequency(k) for k in range(self.size // 2)], self.axis_of_pair, self.interleaved)


class RotaryGridOracle(Oracle):
    def __init__(self, frequencies: List[float], axis_of_pair: List[int], interleaved: bool) -> None:
        self.frequencies, self.axis_of_pair, self.interleaved = frequencies, axis_of_pair, interleaved

    def rotate(self, x: np.ndarray, position: Place) -> np.ndarray:
        """position: coordinates of a token, or one number for all of them."""
        out, pairs = x.copy(), len(self.frequencies)
        for k, (frequency, axis) in enumerate(zip(self.frequencies, self.axis_of_pair, strict=True)):
            a, b = (2 * k, 2 * k + 1) if self.interleaved else (k, k + pairs)
            place = position if isinstance(position, int) else position[axis]
            turned = complex(x[a], x[b]) * cmath.exp(1j * place * frequency)
            out[a], out[b] = turned.real, turned.imag
        return out
