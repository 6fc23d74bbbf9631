"""Rotary position embedding (Su et al. 2021, RoFormer, 3.2 and 3.4.2)."""

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, Rotary


class RoPE(Rotary):
    """Pair k of every query and key head at position p is rotated by the angle p w_k, with
    w_k = theta^(-2k/r); the last D - r entries are unchanged.

    Scores depend on the difference of positions only; the paper counts positions from 1, which
    changes no score.

    Args:
        geometry: head size D.
        theta: base of the frequencies.
        layout: "half" for pairs (k, k + r/2), as LLaMA in transformers; "interleaved" for pairs
            (2k, 2k + 1), as in the paper.
        rotary: rotary size r, even, at most D; D if not given.
    """

    def frequency(self, k: int) -> float:
        return float(self.theta ** (-2 * k / self.size))

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10000.0,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        super().__init__(geometry, layout, rotary)
        self.theta = float(theta)
        self.tabulate()
