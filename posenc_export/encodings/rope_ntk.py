"""NTK-aware scaling of RoPE: a larger base, the same for all lengths (bloc97 2023; Peng et al.
2023, YaRN, 3.1).
"""

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, Rotary


class RoPENTK(Rotary):
    """RoPE with base theta factor^(r/(r-2)): the fastest pair is unchanged, the slowest is
    interpolated by factor.

    Scores depend on the difference of positions only.

    Args:
        geometry: head size D.
        factor: factor by which the range is extended.
        theta, layout, rotary: see RoPE; rotary is at least 4, because the exponent is
            undefined at 2.
    """

    least = {"factor": 1}

    def frequency(self, k: int) -> float:
        return float(self.theta ** (-2 * k / self.size) * self.factor ** (-2 * k / (self.size - 2)))

    def __init__(
        self,
        geometry: Geometry,
        factor: float = 2.0,
        theta: float = 10000.0,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        super().__init__(geometry, layout, rotary, least=4)
        self.theta, self.factor = float(theta), float(factor)
        self.tabulate()
