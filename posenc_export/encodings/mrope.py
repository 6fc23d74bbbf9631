"""Multimodal RoPE: sections of the pairs for time, height and width (Wang et al. 2024, Qwen2-VL,
2.1).
"""

from typing import Literal

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, RotaryGrid
from posenc_export.shared.refusal import refusal


class MRoPE(RotaryGrid):
    """Pair k is rotated by w_k c, w_k = theta^(-2k/r), c a coordinate: time for the first `time`
    pairs, height for the next `height`, width for the rest.

    With order "alternating", the first pairs alternate between height and width, and the last
    `time` pairs use time. The last D - r entries are unchanged.

    Scores depend on the differences of coordinates only.

    Args:
        geometry: head size D.
        time, height: numbers of pairs; width gets the rest of all r/2 pairs. 0 means, with order
            "sections", r/8 and 3r/16, as in Qwen2-VL (16, 24, 24 of 64 pairs); with "alternating",
            about 5r/32 for time, as in Ernie 4.5 VL (20 of 64), and half of the rest for height.
        theta, layout: see RoPE.
        rotary: rotary size r; D if not given, D/2 in GLM-4V.
        order: "sections", as Qwen2-VL and GLM-4V, or "alternating", as Ernie 4.5 VL.
    """

    axes = 3

    def __init__(
        self,
        geometry: Geometry,
        time: int = 0,
        height: int = 0,
        theta: float = 1000000.0,
        layout: Layout = "half",
        rotary: int | None = None,
        order: Literal["sections", "alternating"] = "sections",
    ) -> None:
        super().__init__(geometry, layout, rotary, least=6)
        self.theta = float(theta)
        axes = _sections if order == "sections" else _alternating
        self.axis_of_pair = axes(self.size, time, height)
        self.tabulate()


def _sections(size: int, time: int, height: int) -> list[int]:
    """Axis of each pair: sections of time, height and width, one after the other."""
    first, second = time or max(1, size // 8), height or max(1, 3 * size // 16)
    width = size // 2 - first - second
    if min(first, second, width) < 1:
        rule = f"sections above 0 that add up to {size // 2} pairs"
        raise refusal("mrope", rule, f"time={time}, height={height}", "choose fewer")
    return [0] * first + [1] * second + [2] * width


def _alternating(size: int, time: int, height: int) -> list[int]:
    """Axis of each pair: height and width alternate, time follows."""
    pairs = size // 2
    usual = 5 * size // 32
    last = time or (pairs - 2 * height if height else max(1, usual + (pairs - usual) % 2))
    both, odd = divmod(pairs - last, 2)
    if min(last, both) < 1 or odd or (height and height != both):
        rule = (
            f"as many alternating pairs for height as for width, and the others of {pairs} pairs "
            "for time"
        )
        got = f"time={time}, height={height}"
        raise refusal("mrope", rule, got, f"set time={pairs} - 2 height")
    return [1, 2] * both + [0] * last
