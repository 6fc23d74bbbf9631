"""Multimodal RoPE in sections: time, height, width (Wang et al. 2024, Qwen2-VL, 2.1)."""

from typing import List, Optional

from posenc_export.encodings.base import Geometry
from posenc_export.encodings.rotary import LAYOUTS, check_choice, dtype_of, rotary_size
from posenc_export.encodings.rotary_grid import RotaryGrid
from posenc_export.encodings.yarn import magnitude_of, optional_ramp, scaled_powers

ORDERS = ("sections", "alternating")


class MRoPE(RotaryGrid):
    """Pair k turned by w_k = theta^(-2k/r) times a coordinate: time for the first `time` pairs, height for the next `height`, width for the rest. In order
    "alternating" height and width take the first pairs in turn, and time the last `time` pairs. The last D - r entries stay.

    Hook: rotate. State: none. Range: coordinates [3,B,S], each 0 .. max_positions - 1. Scores depend on the differences of coordinates only.

    Args:
        geometry: head size D.
        time, height: pairs of a section; width has what is left of r/2. Where 0, in sections r/8 and 3r/16, as Qwen2-VL's 16, 24, 24 of 64; alternating
            about 5r/32 for time, as Ernie 4.5 VL's 20 of 64, and half of the others for height.
        theta, layout: as RoPE.
        rotary: rotary size r; all of D where not given, D/2 in GLM-4V.
        order: "sections" as Qwen2-VL and GLM-4V, "alternating" as Ernie 4.5 VL.
        numerics: as RoPE.
        factor: of YaRN, by how much the range is stretched; 1 leaves frequencies as they are.
        original_max_positions, beta_fast, beta_slow, attention_factor, truncate: of YaRN, as rope_yarn, where factor is above 1.

    Raises:
        ValueError: odd or too large rotary size, sections that leave no pair for an axis, other numbers of pairs for height and width where they alternate,
            unknown layout, order or numerics, theta not above 0; of YaRN as rope_yarn, its parameters beside a factor of 1.
    """

    axes = 3

    def __init__(
        self,
        geometry: Geometry,
        time: int = 0,
        height: int = 0,
        theta: float = 1000000.0,
        layout: str = "half",
        rotary: Optional[int] = None,
        order: str = "sections",
        numerics: str = "exact",
        factor: float = 1.0,
        original_max_positions: int = 32768,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: Optional[float] = None,
        truncate: str = "yes",
    ) -> None:
        size = rotary_size("mrope", geometry, rotary, least=6)
        check_choice("mrope", "layout", layout, LAYOUTS)
        check_choice("mrope", "order", order, ORDERS)
        if not theta > 0:
            raise ValueError(f"mrope: theta is above 0, got {theta}")
        axis_of_pair = _sections(size, time, height) if order == "sections" else _alternating(size, time, height)
        scaling = optional_ramp("mrope", size, theta, factor, original_max_positions, beta_fast, beta_slow, attention_factor, truncate)
        frequencies = scaled_powers(float(theta), size, dtype_of("mrope", numerics), scaling)
        super().__init__(geometry, frequencies, axis_of_pair, layout, magnitude=magnitude_of(factor, attention_factor))
        self.theta, self.scaling = float(theta), scaling

    def frequency(self, k: int) -> float:
        plain = float(self.theta ** (-2 * k / self.size))
        return plain if self.scaling is None else self.scaling.frequency(plain, k)


def _sections(size: int, time: int, height: int) -> List[int]:
    """Axis of each pair, one section behind the other."""
    first, second = time or max(1, size // 8), height or max(1, 3 * size // 16)
    width = size // 2 - first - second
    if min(first, second, width) < 1:
        raise ValueError(f"mrope: sections are above 0 and together {size // 2} pairs, got time={time}, height={height}; choose fewer")
    return [0] * first + [1] * second + [2] * width


def _alternating(size: int, time: int, height: int) -> List[int]:
    """Axis of each pair, height and width in turn before time."""
    pairs = size // 2
    usual = 5 * size // 32
    last = time or (pairs - 2 * height if height else max(1, usual + (pairs - usual) % 2))
    both, odd = divmod(pairs - last, 2)
    if min(last, both) < 1 or odd or (height and height != both):
        rule = f"height and width have equal numbers of the {pairs} pairs where they alternate, and time has the others"
        raise ValueError(f"mrope: {rule}, got time={time}, height={height}; set time={pairs} - 2 height")
    return [1, 2] * both + [0] * last
