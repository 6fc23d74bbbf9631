"""Base of rotations on grids: every pair is rotated by one of several coordinates."""

import cmath
import math
from typing import Callable, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table

Place = Union[int, Sequence[int]]


class RotaryGrid(PositionEncoding):
    """Pair k is rotated by w_k times the coordinate axis_of_pair[k]. For text all coordinates of a token are its position.

    Subclasses compute the numbers behind the tables again as scalars in `frequency` and `point`, for the oracle.

    Args:
        geometry: max_positions, for every coordinate.
        frequencies: w_k [r/2] float64; float32 to compute angles in float32, as transformers does.
        axis_of_pair: axis of each pair, r/2 of them.
        layout: "half" or "interleaved".
        points: numbers [axes,max_positions] in place of the coordinates, in the dtype of frequencies; None for the coordinates themselves.
        magnitude: factor on cos and sin.

    Raises:
        ValueError: a magnitude that is not above 0 and finite.
    """

    axes = 2

    def __init__(
        self, geometry: Geometry, frequencies: Tensor, axis_of_pair: List[int], layout: str, points: Optional[Tensor] = None, magnitude: float = 1.0
    ) -> None:
        super().__init__()
        if not 0 < magnitude < math.inf:
            raise ValueError(f"rope: expected attention_factor above 0 and finite, got {magnitude}")
        self.magnitude = magnitude
        self.interleaved, self.size, self.axis_of_pair = layout == "interleaved", 2 * len(frequencies), axis_of_pair
        self.single = frequencies.tolist() if frequencies.dtype == torch.float32 else []
        counted = torch.arange(geometry.max_positions, dtype=frequencies.dtype)[:, None]
        angles = (counted if points is None else points.t()[:, axis_of_pair]) * frequencies
        self.cos, self.sin = Table((angles.cos() * magnitude).numpy()), Table((angles.sin() * magnitude).numpy())
        self.of_axis: Tensor
        self.register_buffer("of_axis", torch.tensor(axis_of_pair)[None] == torch.arange(max(axis_of_pair) + 1)[:, None], persistent=False)

    def frequency(self, k: int) -> float:
        """The frequency w_k of pair k, float64."""
        return 0.0

    def point(self, axis: int, coordinate: int) -> float:
        """The number in place of a coordinate."""
        return float(coordinate)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], coordinates [axes,B,S] int64 to the same shapes and dtypes."""
        cos, sin = self.select_axes(self.cos(positions)), self.select_axes(self.sin(positions))
        return ops.apply_rotation(q, cos, sin, self.interleaved), ops.apply_rotation(k, cos, sin, self.interleaved)

    def select_axes(self, rows: Tensor) -> Tensor:
        """Select the axis of each pair from rows [axes,B,S,r/2]: [B,S,1,r/2]."""
        found = rows[0]
        for axis in range(1, self.of_axis.size(0)):
            found = torch.where(self.of_axis[axis], rows[axis], found)
        return found.unsqueeze(2)

    def oracle(self) -> Oracle:
        frequencies = self.single or [self.frequency(k) for k in range(self.size // 2)]
        return RotaryGridOracle(frequencies, self.axis_of_pair, self.interleaved, self.point, bool(self.single), self.magnitude)


class RotaryGridOracle(Oracle):
    def __init__(
        self, frequencies: List[float], axis_of_pair: List[int], interleaved: bool, point: Callable[[int, int], float], single: bool, magnitude: float
    ) -> None:
        self.frequencies, self.axis_of_pair, self.interleaved, self.point = frequencies, axis_of_pair, interleaved, point
        self.single, self.magnitude = single, magnitude

    def rotate(self, x: np.ndarray, position: Place) -> np.ndarray:
        """Rotate x [D]; position is the coordinates of a token, or one number for all of them."""
        out, pairs = x.copy(), len(self.frequencies)
        for k, (frequency, axis) in enumerate(zip(self.frequencies, self.axis_of_pair, strict=True)):
            a, b = (2 * k, 2 * k + 1) if self.interleaved else (k, k + pairs)
            point = self.point(axis, position if isinstance(position, int) else position[axis])
            angle = float(np.float32(point) * np.float32(frequency)) if self.single else point * frequency
            turned = self.magnitude * complex(x[a], x[b]) * cmath.exp(1j * angle)
            out[a], out[b] = turned.real, turned.imag
        return out
