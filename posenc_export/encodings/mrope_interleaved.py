"""Multimodal RoPE with axes in turn: time, height, width over the whole spectrum (Qwen3-VL 2025)."""

from typing import Optional

from posenc_export.encodings.base import Geometry
from posenc_export.encodings.rotary import LAYOUTS, check_choice, dtype_of, inverse_powers, rotary_size
from posenc_export.encodings.rotary_grid import RotaryGrid


class MRoPEInterleaved(RotaryGrid):
    """Pair k turned by w_k = theta^(-2k/r) times height where k mod 3 = 1 and k < 3 height, width where k mod 3 = 2 and k < 3 width, time elsewhere.
    The last D - r entries stay.

    Hook: rotate. State: none. Range: coordinates [3,B,S], each 0 .. max_positions - 1. Scores depend on the differences of coordinates only.

    Args:
        geometry: head size D.
        height, width: pairs of those axes; where 0, a third of all (5D/32 in Qwen3-VL: 20 of 64).
        theta, layout: as RoPE; layout pairs entries, not axes.
        rotary: rotary size r; all of D where not given, D/4 in Qwen3.5.
        numerics: as RoPE.

    Raises:
        ValueError: odd or too large rotary size, sections that do not fit, unknown layout or numerics, theta not above 0.
    """

    axes = 3

    def __init__(
        self,
        geometry: Geometry,
        height: int = 0,
        width: int = 0,
        theta: float = 5000000.0,
        layout: str = "half",
        rotary: Optional[int] = None,
        numerics: str = "exact",
    ) -> None:
        size = rotary_size("mrope_interleaved", geometry, rotary, least=6)
        check_choice("mrope_interleaved", "layout", layout, LAYOUTS)
        second, third = height or size // 6, width or size // 6
        if min(second, third) < 1 or 3 * max(second, third) > size // 2 or not theta > 0:
            raise ValueError(f"mrope_interleaved: height and width are 1 .. {size // 6} pairs and theta above 0, got {height}, {width} and {theta}")
        axis = [k % 3 if k < 3 * (0, second, third)[k % 3] else 0 for k in range(size // 2)]
        super().__init__(geometry, inverse_powers(float(theta), size, dtype_of("mrope_interleaved", numerics)), axis, layout)
        self.theta = float(theta)

    def frequency(self, k: int) -> float:
        return float(self.theta ** (-2 * k / self.size))
