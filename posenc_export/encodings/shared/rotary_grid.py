"""Base of rotations on grids: every pair is rotated by one of several coordinates."""

from typing import List, Mapping, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Rows
from posenc_export.encodings.shared.rotary import Layout, Place, Rotation, RotationOracle


class RotaryGrid(Rotation):
    """Pair k is rotated by w_k times the coordinate axis_of_pair[k]. For text all coordinates of a
    token are its position.

    Subclasses compute the numbers behind the tables again as scalars in `frequency` and `point`,
    for the oracle.

    Args:
        geometry: max_positions, for every coordinate.
        frequencies, layout, magnitude: see Rotation.
        axis_of_pair: axis of each pair, r/2 of them.
        points: numbers [axes,max_positions] in place of the coordinates, in the dtype of
            frequencies; None for the coordinates themselves.

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
        super().__init__(
            geometry,
            frequencies,
            layout,
            magnitude,
            None if points is None else points.t()[:, axis_of_pair],
        )
        self.axis_of_pair = axis_of_pair
        self.of_axis: Tensor
        self.register_buffer(
            "of_axis",
            torch.tensor(axis_of_pair)[None] == torch.arange(max(axis_of_pair) + 1)[:, None],
            persistent=False,
        )

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], coordinates [axes,B,S] int64 to the same shapes and dtypes."""
        cos, sin = self.select_axes(self.cos(positions)), self.select_axes(self.sin(positions))
        return ops.apply_rotation(q, cos, sin, self.interleaved), ops.apply_rotation(
            k, cos, sin, self.interleaved
        )

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


class RotaryGridOracle(RotationOracle, of=RotaryGrid):
    def tables(self) -> Mapping[str, Rows]:
        # Points that are computed in float32 depend on the order of operations.
        return {} if self.encoding.single and self.has_points else super().tables()

    @property
    def has_points(self) -> bool:
        """Whether other numbers take the place of coordinates."""
        return type(self.encoding).point is not RotaryGrid.point

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        if not self.has_points:
            return positions
        e, places = self.encoding, [int(place) for place in positions[:, 0]]
        of_axis = {axis: [e.point(axis, place) for place in places] for axis in set(e.axis_of_pair)}
        return np.stack([of_axis[axis] for axis in e.axis_of_pair], axis=1)
