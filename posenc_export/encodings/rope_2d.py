"""Mixed RoPE of grids: trained frequencies along rows and columns for every head and pair (Heo et al. 2024, Rotary Position Embedding for Vision Transformer, 3.3)."""

import cmath
import math
from typing import Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Exact, Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.rotary import LAYOUTS, check_choice, rotary_size
from posenc_export.encodings.shared.rotary_grid import Place
from posenc_export.ops.angles import reduced_angle


class RoPE2D(PositionEncoding):
    """Pair k of head h is rotated by row a_hk + column b_hk, or by time c_hk + row a_hk + column b_hk with three axes; a, b, c trained.

    Diagonals therefore have their own frequencies. The vectors (a_hk, b_hk) are initialised with random directions and the lengths of axial RoPE. The last
    D - r entries are unchanged. Angles are computed in float64 and reduced to one turn, so that they are exact at any coordinate.

    Grouped heads share the frequencies of their key head.

    Hook: rotate. State: none. Range: coordinates [axes,B,S], each 0 .. max_positions - 1. Scores depend on the differences of coordinates only.

    Args:
        geometry: head size D, even; kv heads K.
        theta: base of the initial lengths theta^(-2k/r).
        layout, rotary: see RoPE.
        axes: 2 for row and column, 3 for time, row and column.

    Raises:
        ValueError: odd or too large rotary size, unknown layout, theta not above 0, another number of axes.
    """

    axes = 2
    shared = False

    def __init__(self, geometry: Geometry, theta: float = 10.0, layout: str = "half", rotary: Optional[int] = None, axes: int = 2) -> None:
        super().__init__()
        size = rotary_size("rope_2d", geometry, rotary)
        check_choice("rope_2d", "layout", layout, LAYOUTS)
        if not theta > 0:
            raise ValueError(f"rope_2d: expected theta above 0, got {theta}")
        if axes not in (2, 3):
            raise ValueError(f"rope_2d: expected axes to be 2 or 3, got {axes}; set axes=2 for images, axes=3 for videos")
        self.interleaved, kv_heads = layout == "interleaved", geometry.kv_heads or geometry.heads
        self.along = Exact(theta ** (-torch.arange(0, size, 2) / size) * _directions(kv_heads, axes))
        self.heads, self.axes, self.size = geometry.heads, axes, size

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], coordinates [axes,B,S] int64 to the same shapes and dtypes."""
        places, along = positions.to(torch.float64).unsqueeze(3).unsqueeze(4), self.along().to(torch.float64)
        turns = places[0] * along[0]
        for axis in range(1, along.size(0)):
            turns = turns + places[axis] * along[axis]
        angles = reduced_angle(turns)
        cos, sin = angles.cos(), angles.sin()
        each = q.size(2) // k.size(2)
        return ops.apply_rotation(q, cos.repeat_interleave(each, 2), sin.repeat_interleave(each, 2), self.interleaved), ops.apply_rotation(k, cos, sin, self.interleaved)

    def oracle(self) -> Oracle:
        return RoPE2DOracle(self.along().detach().double().numpy(), self.interleaved)


def _directions(heads: int, axes: int) -> Tensor:
    """Random directions of unit length [axes,heads,1]."""
    if axes == 2:
        angles = 2 * math.pi * torch.rand(heads, 1)
        return torch.stack((angles.cos(), angles.sin()))
    return torch.nn.functional.normalize(torch.randn(axes, heads, 1), dim=0)


class RoPE2DOracle(Oracle):
    def __init__(self, along: np.ndarray, interleaved: bool) -> None:
        self.along, self.interleaved = along, interleaved

    def rotate_heads(self, x: np.ndarray, position: Place) -> np.ndarray:
        return np.stack([self.turned(head, position, index * self.along.shape[1] // len(x)) for index, head in enumerate(x)])

    def rotate_key_heads(self, x: np.ndarray, position: Place) -> np.ndarray:
        return self.rotate_heads(x, position)

    def turned(self, x: np.ndarray, place: Place, head: int) -> np.ndarray:
        out, pairs = x.copy(), self.along.shape[2]
        places = [place] * len(self.along) if isinstance(place, int) else place
        for k in range(pairs):
            a, b = (2 * k, 2 * k + 1) if self.interleaved else (k, k + pairs)
            wave = complex(x[a], x[b]) * cmath.exp(1j * math.fsum(p * self.along[axis, head, k] for axis, p in enumerate(places)))
            out[a], out[b] = wave.real, wave.imag
        return out
