"""Multimodal RoPE in sections: time, height, width (Wang et al. 2024, Qwen2-VL, 2.1)."""

import numpy as np

from posenc_export.encodings.base import Geometry
from posenc_export.encodings.rotary import LAYOUTS, check_choice, rotary_size
from posenc_export.encodings.rotary_grid import RotaryGrid


class MRoPE(RotaryGrid):
    """Pair k turned by w_k = theta^(-2k/D) times time for the first `time` pairs, height for the next `height`, width for the rest.

    Hook: rotate. State: none. Range: coordinates [3,B,S], each 0 .. max_positions - 1. Scores depend on the differences of coordinates only.

    Args:
        geometry: head size D, even.
        time, height: pairs of a section; width has what is left of D/2. Where 0: D/8 and 3D/16, as Qwen2-VL's 16, 24, 24 of 64.
        theta, layout: as RoPE.

    Raises:
        ValueError: odd head size, sections that leave no pair for the width, unknown layout, theta not above 0.
    """

    axes = 3

    def __init__(self, geometry: Geometry, time: int = 0, height: int = 0, theta: float = 1000000.0, layout: str = "half") -> None:
        size = rotary_size("mrope", geometry, None, least=6)
        check_choice("mrope", "layout", layout, LAYOUTS)
        first = time or max(1, size // 8)
        second = height or max(1, 3 * size // 16)
        width = size // 2 - first - second
        if min(first, second, width) < 1 or not theta > 0:
            raise ValueError(f"mrope: sections are above 0 and together {size // 2} pairs, and theta is above 0, got time={time}, height={height}, theta={theta}")
        super().__init__(geometry, float(theta) ** (-np.arange(0, size, 2) / size), [0] * first + [1] * second + [2] * width, layout)
        self.theta = float(theta)

    def frequency(self, k: int) -> float:
        return float(self.theta ** (-2 * k / self.size))
