"""Multimodal RoPE with interleaved axes: time, height and width alternate over the whole
spectrum (Qwen3-VL 2025).
"""

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, RotaryGrid
from posenc_export.shared.refusal import refusal


class MRoPEInterleaved(RotaryGrid):
    """Pair k is rotated by w_k c, w_k = theta^(-2k/r), c a coordinate: height if k mod 3 = 1 and k
    < 3 height, width if k mod 3 = 2 and k < 3 width, else time.

    The last D - r entries are unchanged.

    Scores depend on the differences of coordinates only.

    Args:
        geometry: head size D.
        height, width: numbers of pairs, at most a third of all, and 0 for a third; 20 of 64 in
            Qwen3-VL.
        theta, layout: see RoPE; layout pairs entries, not axes.
        rotary: rotary size r; D if not given, D/4 in Qwen3.5.
    """

    axes = 3

    def __init__(
        self,
        geometry: Geometry,
        height: int = 0,
        width: int = 0,
        theta: float = 5000000.0,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        super().__init__(geometry, layout, rotary, least=6)
        self.theta = float(theta)
        pairs = self.size // 2
        second, third = height or pairs // 3, width or pairs // 3
        if not 1 <= second <= (pairs + 1) // 3 or not 1 <= third <= pairs // 3:
            rule = f"height within 1 .. {(pairs + 1) // 3} and width within 1 .. {pairs // 3} pairs"
            raise refusal("mrope_interleaved", rule, f"{height} and {width}", "choose others")
        self.axis_of_pair = [
            k % 3 if k < 3 * (0, second, third)[k % 3] else 0 for k in range(pairs)
        ]
        self.tabulate()
