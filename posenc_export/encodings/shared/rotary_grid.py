"""Base of rotations on grids: every pair is rotated by one of several coordinates."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, Place, Rotation


class RotaryGrid(Rotation):
    """Pair k is rotated by w_k times the coordinate axis_of_pair[k]. For text all coordinates of a
    token are its position.

    Subclasses compute the numbers behind the tables again as scalars in `frequency` and `point`,
    for the oracle.

    Args:
        geometry: max_positions, for every coordinate.
        frequencies, layout, magnitude: see Rotation.
        axis_of_pair: axis of each pair, r/2 of them.
        points: numbers [axes,max_positions] float64 in place of the coordinates; None for
            the coordinates themselves.

    Raises:
        ValueError: a magnitude that is not above 0 and finite.
    """

    axes = 2

    def __init__(
        self,
        geometry: Geometry,
        frequencies: Tensor,
        axis_of_pair: List[int],
        layout: Layout,
        points: Optional[Tensor] = None,
        magnitude: float = 1.0,
    ) -> None:
        numbers = None if points is None else points.t()[:, axis_of_pair]  # [max_positions,r/2]
        super().__init__(geometry, frequencies, layout, magnitude, numbers)
        self.axis_of_pair = axis_of_pair
        self.of_axis: Tensor
        of_axis = torch.tensor(axis_of_pair)[None] == torch.arange(max(axis_of_pair) + 1)[:, None]
        self.register_buffer("of_axis", of_axis, persistent=False)  # [axes,r/2]

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
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

    def point(self, axis: int, coordinate: int) -> float:
        """The number in place of a coordinate."""
        return float(coordinate)

    def number(self, k: int, place: Place) -> float:
        axis = self.axis_of_pair[k]
        return self.point(axis, place if isinstance(place, int) else place[axis])
