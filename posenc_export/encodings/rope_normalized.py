"""Axial RoPE of grids scaled to -1 .. 1 (Siméoni et al. 2025, DINOv3, 3.2; also that of
lucidrains' rotary-embedding-torch with freqs_for="pixel").
"""

import math
from typing import Any, Literal

import numpy as np

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, RotaryGrid


class RoPENormalized(RotaryGrid):
    """Pair a n + k is rotated by c_a w_k, with A axes of N_a places and n = r/(2A) pairs per axis,
    k = 0 .. n - 1.

    With points "centres", c_a = (2 p_a + 1) / N_a - 1 is the centre of place p_a. With "ends", c_a
    = 2 p_a / (N_a - 1) - 1, so that the first and the last place are -1 and 1. With spectrum
    "powers", w_k = 2 pi theta^(-k/n). With "linear", w_k is pi times n equally spaced numbers from
    1 to highest / 2. The last D - r entries are unchanged.

    A coordinate of at least N_a marks a token outside the grid, and c_a is 0. Class and register
    tokens, with coordinates (rows, columns), are therefore not rotated, as in DINOv3.

    Scores of two tokens in the grid depend on the differences of coordinates only.

    Args:
        geometry: head size D; r is a multiple of 2A.
        rows, columns: N_a of the grid; 0 for max_positions.
        frames: N_a of time, which is then the first of 3 axes; 0 for 2 axes.
        points: "centres", as DINOv3, or "ends", as rotary-embedding-torch.
        spectrum: "powers", as DINOv3, or "linear", as rotary-embedding-torch for pixels.
        theta: base of spectrum "powers".
        highest: half turns of the fastest pair from -1 to 1, for spectrum "linear".
        layout, rotary: see RoPE.
    """

    above = {"theta": 0, "highest": 0}
    least = {"rows": 0, "columns": 0, "frames": 0}

    def frequency(self, k: int) -> float:
        index = k % self.pairs
        if self.powers:
            return float(self.theta ** (-index / self.pairs))
        return math.pi * (1 + (self.highest / 2 - 1) * index / max(self.pairs - 1, 1))

    def __init__(
        self,
        geometry: Geometry,
        rows: int = 0,
        columns: int = 0,
        frames: int = 0,
        points: Literal["centres", "ends"] = "centres",
        spectrum: Literal["powers", "linear"] = "powers",
        theta: float = 100.0,
        highest: float = 10.0,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        axes = 3 if frames else 2
        super().__init__(geometry, layout, rotary, least=2 * axes)
        self.check_multiple("rotary size", self.size, 2 * axes, "set rotary=R")
        self.axes, self.pairs, self.points = axes, self.size // (2 * axes), points
        self.powers, self.theta, self.highest = spectrum == "powers", float(theta), float(highest)
        self.counts = [frames] * (axes - 2) + [rows or self.count, columns or self.count]
        self.axis_of_pair = [k // self.pairs for k in range(self.size // 2)]
        self.tabulate(self.numbers(np.arange(self.count)[:, None]))

    def point(self, axis: int, coordinate: Any) -> Any:
        count = self.counts[axis]
        if self.points == "centres":
            along = (coordinate + 0.5) / count
        else:
            along = coordinate / max(count - 1, 1)
        turns = 2 * math.pi if self.powers else 1
        return np.where(coordinate < count, turns * (2 * along - 1), 0.0)
