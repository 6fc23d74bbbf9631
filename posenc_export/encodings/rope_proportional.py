"""Proportional RoPE: the slow pairs are not rotated (Barbero et al. 2024, Round and Round We Go,
p-RoPE; as in Gemma).
"""

import torch

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, Rotary, powers_of, rotary_size


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
        return float(self.theta ** (-2 * k / self.size) / self.factor) if k < self.rotated else 0.0

    def __init__(
        self,
        geometry: Geometry,
        share: float = 0.5,
        factor: float = 1.0,
        theta: float = 10000.0,
        layout: Layout = "half",
    ) -> None:
        size = rotary_size("rope_proportional", geometry, None)
        rotated = int(share * size // 2)
        if not rotated:
            raise ValueError(
                f"rope_proportional: expected at least one rotated pair, got share={share} "
                f"of {size // 2} pairs; choose a larger share"
            )
        frequencies = powers_of(theta, size) / factor
        frequencies = torch.where(torch.arange(size // 2) < rotated, frequencies, 0.0)
        super().__init__(geometry, frequencies, layout)
        self.theta, self.factor, self.rotated = float(theta), float(factor), rotated
