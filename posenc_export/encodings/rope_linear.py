"""Linear scaling of RoPE: positions are interpolated (Chen et al. 2023, Extending Context Window
via Positional Interpolation, 2.3).
"""

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, Rotary


class RoPELinear(Rotary):
    """RoPE at position p / factor: w_k = theta^(-2k/r) / factor.

    Scores depend on the difference of positions only.

    Args:
        geometry: head size D.
        factor: factor by which the range is extended; a factor below 1 spreads positions apart, by
            alpha = 1 / factor.
        theta, layout, rotary: see RoPE.
    """

    above = {"theta": 0, "factor": 0}

    def frequency(self, k: int) -> float:
        return float(1 / (self.factor * self.theta ** (2 * k / self.size)))

    def __init__(
        self,
        geometry: Geometry,
        factor: float = 2.0,
        theta: float = 10000.0,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        super().__init__(geometry, layout, rotary)
        self.theta, self.factor = float(theta), float(factor)
        self.tabulate()
