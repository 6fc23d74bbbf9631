"""Proportional RoPE: the slow pairs are not rotated (Barbero et al. 2024, Round and Round We Go,
p-RoPE; as in Gemma).
"""

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, Rotary
from posenc_export.shared.refusal import refusal


class RoPEProportional(Rotary):
    """w_k = theta^(-2k/D) / factor for the first share D / 2 pairs, 0 for the others; unlike in
    partial RoPE, exponents refer to the whole head.

    Scores depend on the difference of positions only.

    Args:
        geometry: head size D, even.
        share: share of the pairs that is rotated, above 0 and at most 1.
        factor: factor by which the range is extended.
        theta, layout: see RoPE.
    """

    above = {"theta": 0, "share": 0}
    least = {"factor": 1}
    most = {"share": 1}

    def frequency(self, k: int) -> float:
        return super().frequency(k) / self.factor if k < self.rotated else 0.0

    def __init__(
        self,
        geometry: Geometry,
        share: float = 0.5,
        factor: float = 1.0,
        theta: float = 10000.0,
        layout: Layout = "half",
    ) -> None:
        super().__init__(geometry, layout)
        self.theta, self.factor = float(theta), float(factor)
        self.rotated = int(share * self.size // 2)
        if not self.rotated:
            got = f"share={share} of {self.size // 2} pairs"
            remedy = "choose a larger share"
            raise refusal("rope_proportional", "at least one rotated pair", got, remedy)
        self.tabulate()
