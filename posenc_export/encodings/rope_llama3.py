"""Llama 3.1 scaling of RoPE: short wavelengths are kept, long ones interpolated, those between
blended (Meta 2024, llama-models).
"""

import math

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, Rotary
from posenc_export.shared.refusal import refusal


class RoPELlama3(Rotary):
    """w_k = theta^(-2k/r) for wavelengths below L / high_freq_factor, theta^(-2k/r) / factor for
    wavelengths above L / low_freq_factor.

    In between, w_k is the mean of the two, with weight (L / wavelength - low_freq_factor) /
    (high_freq_factor - low_freq_factor) for the first.

    Scores depend on the difference of positions only.

    Args:
        geometry: head size D.
        factor: factor by which long wavelengths are extended.
        low_freq_factor, high_freq_factor: limits of the blended range, in turns within L, the
            second above the first.
        original_max_positions: L, tokens the model was trained on.
        theta, layout, rotary: see RoPE.
    """

    least = {"factor": 1, "original_max_positions": 1}

    def frequency(self, k: int) -> float:
        kept = super().frequency(k)
        wavelength = 2 * math.pi / kept
        if wavelength < self.length / self.upper:
            return kept
        if wavelength > self.length / self.lower:
            return kept / self.factor
        share = (self.length / wavelength - self.lower) / (self.upper - self.lower)
        return kept * (share + (1 - share) / self.factor)

    def __init__(
        self,
        geometry: Geometry,
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_positions: int = 8192,
        theta: float = 500000.0,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        if not high_freq_factor > low_freq_factor > 0:
            rule = "high_freq_factor above low_freq_factor above 0"
            raise refusal("rope_llama3", rule, f"{high_freq_factor} and {low_freq_factor}")
        super().__init__(geometry, layout, rotary)
        self.theta, self.factor, self.length = float(theta), float(factor), original_max_positions
        self.lower, self.upper = float(low_freq_factor), float(high_freq_factor)
        self.tabulate()
