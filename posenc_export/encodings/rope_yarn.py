"""YaRN: fast pairs of RoPE kept, slow ones interpolated, a ramp between, and a temperature (Peng et al. 2023, YaRN, 3.2 to 3.4)."""

import math
from typing import Optional

import torch

from posenc_export.encodings.base import Geometry
from posenc_export.encodings.rotary import LAYOUTS, Rotary, check_choice, dtype_of, rotary_size

TRUNCATE = ("yes", "no")


class RoPEYaRN(Rotary):
    """w_k = (1 - g_k) theta^(-2k/r) + g_k theta^(-2k/r) / factor, g_k a ramp from 0 at the pair that turns beta_fast times within the trained length L
    to 1 at the one that turns beta_slow times; cos and sin scaled by attention_factor.

    Hook: rotate. State: none. Range: 0 .. max_positions - 1. Scores depend on the difference of positions only.

    Args:
        geometry: head size D.
        factor: by how much the range is stretched.
        original_max_positions: L, tokens.
        beta_fast, beta_slow: turns within L.
        attention_factor: where not given, m(mscale) / m(mscale_all_dim) if both are above 0, else m(1); m(s) = 0.1 s ln(factor) + 1.
        mscale, mscale_all_dim: as DeepSeek; 0 for not given.
        truncate: "yes" puts the ends of the ramp on whole pairs, as the authors do; "no" as gpt-oss.
        theta, layout, rotary, numerics: as RoPE.

    Raises:
        ValueError: as RoPE; a factor below 1, a length below 1, beta_fast not above beta_slow.
    """

    def __init__(
        self,
        geometry: Geometry,
        factor: float = 4.0,
        original_max_positions: int = 2048,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: Optional[float] = None,
        mscale: float = 0.0,
        mscale_all_dim: float = 0.0,
        truncate: str = "yes",
        theta: float = 10000.0,
        layout: str = "half",
        rotary: Optional[int] = None,
        numerics: str = "exact",
    ) -> None:
        size = rotary_size("rope_yarn", geometry, rotary)
        check_choice("rope_yarn", "layout", layout, LAYOUTS)
        check_choice("rope_yarn", "truncate", truncate, TRUNCATE)
        if not theta > 1 or not 1 <= factor < math.inf or original_max_positions < 1:
            raise ValueError(f"rope_yarn: theta above 1, factor and original_max_positions at least 1, got {theta}, {factor} and {original_max_positions}")
        if not beta_fast > beta_slow > 0:
            raise ValueError(f"rope_yarn: beta_fast is above beta_slow, which is above 0, got {beta_fast} and {beta_slow}")
        first, last = (_pair(turns, size, float(theta), original_max_positions) for turns in (beta_fast, beta_slow))
        if truncate == "yes":
            first, last = math.floor(first), math.ceil(last)
        low, high = max(first, 0), min(last, size - 1)
        dtype = dtype_of("rope_yarn", numerics)
        if not math.isfinite(theta) or mscale < 0 or mscale_all_dim < 0:
            raise ValueError(f"rope_yarn: theta is finite, mscale and mscale_all_dim are 0 or more, got {theta}, {mscale} and {mscale_all_dim}")
        powers = float(theta) ** (torch.arange(0, size, 2, dtype=dtype) / size)
        ramp = ((torch.arange(size // 2, dtype=dtype) - low) / (high - low or 0.001)).clamp(0, 1)
        if attention_factor is None:
            both = mscale > 0 and mscale_all_dim > 0
            attention_factor = _temperature(factor, mscale) / _temperature(factor, mscale_all_dim) if both else _temperature(factor, 1.0)
        kept = 1 - ramp
        super().__init__(geometry, 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, layout, float(attention_factor))
        self.theta, self.factor, self.low, self.high = float(theta), float(factor), low, high

    def frequency(self, k: int) -> float:
        kept = 1 / math.pow(self.theta, 2 * k / self.size)
        share = min(max((k - self.low) / ((self.high - self.low) or 0.001), 0.0), 1.0)
        return kept * (1 - share + share / self.factor)


def _pair(turns: float, size: int, theta: float, length: int) -> float:
    """The pair, as a real number, that turns `turns` times within `length` tokens."""
    return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
