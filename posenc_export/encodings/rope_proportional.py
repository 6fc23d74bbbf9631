"""Proportional RoPE: the slow pairs do not turn at all (Barbero et al. 2024, Round and Round We Go, p-RoPE; as in Gemma)."""

import math

import torch

from posenc_export.encodings.base import Geometry
from posenc_export.encodings.rotary import LAYOUTS, Rotary, check_choice, dtype_of, rotary_size


class RoPEProportional(Rotary):
    """w_k = theta^(-2k/D) / factor for the first share D / 2 pairs, 0 for the others: exponents are those of the whole head, unlike partial RoPE's.

    Hook: rotate. State: none. Range: 0 .. max_positions - 1. Scores depend on the difference of positions only.

    Args:
        geometry: head size D, even.
        share: of pairs that turn, above 0, at most 1.
        factor: by how much the range is stretched.
        theta, layout, numerics: as RoPE.

    Raises:
        ValueError: as RoPE; a share outside 0 .. 1, a factor below 1.
    """

    def __init__(
        self, geometry: Geometry, share: float = 0.5, factor: float = 1.0, theta: float = 10000.0, layout: str = "half", numerics: str = "exact"
    ) -> None:
        size = rotary_size("rope_proportional", geometry, None)
        check_choice("rope_proportional", "layout", layout, LAYOUTS)
        if not theta > 0 or not 1 <= factor < math.inf or not 0 < share <= 1:
            raise ValueError(f"rope_proportional: theta above 0, factor at least 1, share above 0 and at most 1, got {theta}, {factor} and {share}")
        turning, dtype = int(share * size // 2), dtype_of("rope_proportional", numerics)
        if not turning or not math.isfinite(theta):
            raise ValueError(f"rope_proportional: a pair at least turns and theta is finite, got share={share} of {size // 2} pairs, theta={theta}")
        moving = 1.0 / (float(theta) ** (torch.arange(0, 2 * turning, 2, dtype=dtype) / size))
        super().__init__(geometry, torch.cat((moving, torch.zeros(size // 2 - turning, dtype=dtype))) / factor, layout)
        self.theta, self.factor, self.turning = float(theta), float(factor), turning

    def frequency(self, k: int) -> float:
        return float(self.theta ** (-2 * k / self.size) / self.factor) if k < self.turning else 0.0
