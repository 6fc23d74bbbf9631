"""Llama 3.1 scaling of RoPE: wavelengths short against the trained length kept, long ones interpolated, blended between (Meta 2024, llama-models)."""

import math
from typing import Optional

import torch

from posenc_export.encodings.base import Geometry
from posenc_export.encodings.rotary import LAYOUTS, Rotary, check_choice, dtype_of, inverse_powers, rotary_size


class RoPELlama3(Rotary):
    """w_k = theta^(-2k/r) where a turn is shorter than L / high_freq_factor, that over factor where it is longer than L / low_freq_factor, between them
    the mean weighted by (L / turn - low_freq_factor) / (high_freq_factor - low_freq_factor).

    Hook: rotate. State: none. Range: 0 .. max_positions - 1. Scores depend on the difference of positions only.

    Args:
        geometry: head size D.
        factor: by how much long wavelengths are stretched.
        low_freq_factor, high_freq_factor: borders, in turns within L.
        original_max_positions: L, tokens.
        theta, layout, rotary, numerics: as RoPE.

    Raises:
        ValueError: as RoPE; a factor below 1, a length below 1, high_freq_factor not above low_freq_factor.
    """

    def __init__(
        self,
        geometry: Geometry,
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_positions: int = 8192,
        theta: float = 500000.0,
        layout: str = "half",
        rotary: Optional[int] = None,
        numerics: str = "exact",
    ) -> None:
        size = rotary_size("rope_llama3", geometry, rotary)
        check_choice("rope_llama3", "layout", layout, LAYOUTS)
        if not theta > 0 or not 1 <= factor < math.inf or original_max_positions < 1:
            raise ValueError(f"rope_llama3: theta above 0, factor and original_max_positions at least 1, got {theta}, {factor} and {original_max_positions}")
        if not high_freq_factor > low_freq_factor > 0:
            raise ValueError(f"rope_llama3: high_freq_factor is above low_freq_factor, which is above 0, got {high_freq_factor} and {low_freq_factor}")
        kept = inverse_powers(float(theta), size, dtype_of("rope_llama3", numerics))
        turns = original_max_positions / (2 * math.pi / kept)
        share = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
        super().__init__(geometry, torch.where(share == 1, kept, (1 - share) * kept / factor + share * kept), layout)
        self.theta, self.factor, self.length = float(theta), float(factor), original_max_positions
        self.lower, self.upper = float(low_freq_factor), float(high_freq_factor)

    def frequency(self, k: int) -> float:
        kept = float(self.theta ** (-2 * k / self.size))
        wavelength = 2 * math.pi / kept
        if wavelength < self.length / self.upper:
            return kept
        if wavelength > self.length / self.lower:
            return kept / self.factor
        share = (self.length / wavelength - self.lower) / (self.upper - self.lower)
        return kept * (share + (1 - share) / self.factor)
