"""Axial RoPE of grids: every coordinate rotates an equal share of the pairs (Heo et al. 2024,
Rotary Position Embedding for Vision Transformer, 3.2).
"""

from typing import Literal

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, RotaryGrid


class RoPEAxial(RotaryGrid):
    """Pair a n + k is rotated by coordinate a times w_ak, with A axes and n = r/(2A) pairs per
    axis, k = 0 .. n - 1.

    With spectrum "each", w_ak = theta^(-k/n) is the same for all axes. With "alternating", the axes
    share the frequencies of one spectrum in turn, w_ak = theta^(-(A k + a)/(A n)). The last D - r
    entries are unchanged.

    Scores depend on the differences of coordinates only.

    Llama 4 counts rows and columns of patches from 1; its class token has coordinates 0 and is not
    rotated.

    Args:
        geometry: head size D; r is a multiple of 2A.
        theta: 100 in the paper, because grids are short.
        layout: see RoPE; for the r rotated entries.
        rotary: rotary size r; D if not given.
        axes: A: 2 for row and column, 3 for time, row and column.
        spectrum: "each", as in the paper, or "alternating", as in Pixtral.
    """

    least = {"axes": 2}
    most = {"axes": 8}  # of the manifest

    def frequency(self, k: int) -> float:
        axis, index = divmod(k, self.pairs)
        step = axis / self.axes if self.spectrum == "alternating" else 0.0
        return float(self.theta ** -((index + step) / self.pairs))

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 100.0,
        layout: Layout = "half",
        rotary: int | None = None,
        axes: int = 2,
        spectrum: Literal["each", "alternating"] = "each",
    ) -> None:
        super().__init__(geometry, layout, rotary, least=2 * axes)
        self.check_multiple("rotary size", self.size, 2 * axes, "set rotary=R")
        self.theta, self.axes, self.spectrum = float(theta), axes, spectrum
        self.pairs = self.size // (2 * axes)
        self.axis_of_pair = [k // self.pairs for k in range(self.size // 2)]
        self.tabulate()
