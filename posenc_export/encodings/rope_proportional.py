"""Proportional RoPE: the slow pairs are not rotated (Barbero et al. 2024, Round and Round We Go, p-RoPE; as in Gemma)."""

import math

import torch

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import LAYOUTS, Rotary, check_choice, dtype_of, rotary_size


class RoPEProportional(Rotary):
    """w_k = theta^(-2k/D) / factor for the first share D / 2 pairs, 0 for the others; unlike in partial RoPE, exponents refer to the whole head.

    Hook: rotate. State: none. Range: 0 .. max_positions - 1. Scores depend on the difference of positions only.

    Args:
        geometry: head size D, even.
        share: share of the pairs that is rotated, above 0 and at most 1.
        factor: factor by which the range is extended.
        theta, layout, numerics: see RoPE.

    Raises:
        ValueError: see RoPE; share outside 0 .. 1, factor below 1.
    """

    def __init__(
        self, geometry: Geometry, share: float = 0.5, factor: float = 1.0, theta: float = 10000.0, layout: str = "half", numerics: str = "exact"
    ) -> None:
        size = rotary_size("rope_proportional", geometry, None)
        check_choice("rope_proportional", "layout", layout, LAYOUTS)
        if not theta > 0 or not 1 <= factor < math.inf or not 0 < share <= 1:
            rule = "theta above 0, factor of at least 1, share above 0 and at most 1"
            raise ValueError(f"rope_proportional: expected {rule}, got {theta}, {factor} and {share}")
        turning, dtype = int(share * size // 2), dtype_of("rope_proportional", numerics)
        if not turning or not math.isfinite(theta):
            raise ValueError(f"rope_proportional: expected at least one rotated pair and a finite theta, got share={share} of {size // 2} pairs, theta={theta}")
        moving = 1.0 / (float(theta) ** (torch.arange(0, 2 * turning, 2, dtype=dtype) / size))
        super().__init__(geometry, torch.cat((moving, torch.zeros(size // 2 - turning, dtype=dtype))) / factor, layout)
        self.theta, self.factor, self.turning = float(theta), float(factor), turning

    def frequency(self, k: int) -> float:
        return float(self.theta ** (-2 * k / self.size) / self.factor) if k < self.turning else 0.0
