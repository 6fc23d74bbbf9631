"""Axial RoPE of grids: half of the pairs for the row, half for the column (Heo et al. 2024, Rotary Position Embedding for Vision Transformer, 3.2)."""

import numpy as np

from posenc_export.encodings.base import Geometry
from posenc_export.encodings.rotary import LAYOUTS, check_choice, rotary_size
from posenc_export.encodings.rotary_grid import RotaryGrid


class RoPEAxial(RotaryGrid):
    """Pairs 0 .. D/4 - 1 turned by row w_k, the next D/4 by column w_k, w_k = theta^(-4k/D), k = 0 .. D/4 - 1 for both.

    Hook: rotate. State: none. Range: coordinates [2,B,S], each 0 .. max_positions - 1. Scores depend on the differences of coordinates only.

    Args:
        geometry: head size D, a multiple of 4.
        theta: 100 in the paper, for grids are short.
        layout: as RoPE, over the whole head.

    Raises:
        ValueError: a head size that is no multiple of 4, unknown layout, theta not above 0.
    """

    axes = 2

    def __init__(self, geometry: Geometry, theta: float = 100.0, layout: str = "half") -> None:
        size = rotary_size("rope_axial", geometry, None, least=4)
        check_choice("rope_axial", "layout", layout, LAYOUTS)
        if size % 4 or not theta > 0:
            raise ValueError(f"rope_axial: head size is a multiple of 4 and theta above 0, got {size} and {theta}; choose another head size")
        each = size // 4
        super().__init__(geometry, np.tile(float(theta) ** (-np.arange(each) / each), 2), [0] * each + [1] * each, layout)
        self.theta, self.each = float(theta), each

    def frequency(self, k: int) -> float:
        return float(self.theta ** (-(k % self.each) / self.each))
