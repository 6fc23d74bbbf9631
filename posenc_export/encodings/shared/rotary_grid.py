"""Base of rotations on grids: every pair is rotated by one of several coordinates."""

from typing import Any, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.rotary import Rotation


class RotaryGrid(Rotation):
    """Pair k is rotated by w_k times the coordinate axis_of_pair[k]. For text all coordinates of a
    token are its position.

    A subclass sets `axis_of_pair`, the axis of each of the r/2 pairs, before it calls `tabulate`.
    """

    axes = 2
    axis_of_pair: List[int]

    def tabulate(self, numbers: Optional[np.ndarray] = None) -> None:
        super().tabulate(numbers)
        of_pair = torch.tensor(self.axis_of_pair)
        self.of_axis: Tensor
        of_axis = of_pair == torch.arange(int(of_pair.max()) + 1)[:, None]
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

    def point(self, axis: int, coordinate: Any) -> Any:
        """The number in place of a coordinate, or of coordinates [n]."""
        return coordinate

    def numbers(self, place: Any) -> np.ndarray:
        of_axes = [
            np.atleast_1d(self.point(axis, place[axis] if isinstance(place, tuple) else place))
            for axis in range(self.axes)
        ]
        return np.concatenate([of_axes[axis] for axis in self.axis_of_pair], axis=-1)
