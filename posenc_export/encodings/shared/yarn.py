"""YaRN: ramp, temperature, and grids of M-RoPE (Peng et al. 2023, YaRN, 3.2 to 3.4)."""

import math
from dataclasses import dataclass
from typing import Literal, Optional

from posenc_export.encodings.shared.base import Geometry, key_of
from posenc_export.encodings.shared.rotary import Layout, RotaryGrid
from posenc_export.shared.refusal import refusal

Truncate = Literal["yes", "no"]


@dataclass(frozen=True)
class YaRN:
    """Parameters of RoPEYaRN; length is original_max_positions. A factor of 1 scales nothing."""

    factor: float = 1.0
    length: int = 32768
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: Optional[float] = None
    truncate: Truncate = "yes"


@dataclass(frozen=True)
class Ramp:
    """Scaled frequencies (1 - g_k) w_k + g_k w_k / factor, where g_k grows from 0 to 1 along the
    pairs.
    """

    factor: float  # factor by which the range is extended
    # Pairs between which g_k grows from 0 to 1
    low: float
    high: float

    def frequency(self, kept: float, k: int) -> float:
        """The scaled frequency of pair k, float64; kept is w_k."""
        share = min(max((k - self.low) / ((self.high - self.low) or 0.001), 0.0), 1.0)
        return kept * (1 - share + share / self.factor)


def ramp_of(name: str, yarn: YaRN, theta: float, size: int) -> Ramp:
    """The ramp for rotary size r and base theta. ValueError: theta not above 1, beta_fast not above
    beta_slow above 0.
    """
    fast, slow = float(yarn.beta_fast), float(yarn.beta_slow)
    if not theta > 1:
        raise refusal(name, "theta above 1", theta)
    if not fast > slow > 0:
        rule = "beta_fast above beta_slow above 0"
        raise refusal(name, rule, f"{yarn.beta_fast} and {yarn.beta_slow}")
    first, last = (_pair(turns, size, float(theta), yarn.length) for turns in (fast, slow))
    if yarn.truncate == "yes":
        first, last = math.floor(first), math.ceil(last)
    return Ramp(float(yarn.factor), max(first, 0), min(last, size - 1))


def magnitude_of(yarn: YaRN, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """attention_factor, else m(mscale) / m(mscale_all_dim) if both are above 0, else m(1)."""
    if yarn.attention_factor is not None:
        return float(yarn.attention_factor)
    if mscale > 0 and mscale_all_dim > 0:
        return stretched(yarn.factor, mscale) / stretched(yarn.factor, mscale_all_dim)
    return stretched(yarn.factor, 1.0)


def stretched(factor: float, scale: float) -> float:
    """m(scale) = 0.1 scale ln(factor) + 1, or 1 if factor is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _pair(turns: float, size: int, theta: float, length: int) -> float:
    """The pair, as a real number, that makes `turns` turns within `length` tokens."""
    return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


class YaRNGrid(RotaryGrid):
    """Three axes, whose frequencies theta^(-2k/r) are scaled along the ramp of YaRN if factor is
    above 1.

    Args:
        geometry, layout, theta, rotary: see RoPE.
        yarn: parameters of YaRN.

    Raises:
        ValueError: see ramp_of; a parameter of YaRN that is set with a factor of 1.
    """

    axes = 3
    least = {"factor": 1, "original_max_positions": 1}

    def frequency(self, k: int) -> float:
        plain = super().frequency(k)
        return plain if self.scaling is None else self.scaling.frequency(plain, k)

    def __init__(
        self, geometry: Geometry, layout: Layout, theta: float, rotary: Optional[int], yarn: YaRN
    ) -> None:
        super().__init__(geometry, layout, rotary, least=6)
        name = key_of(self)
        if yarn.factor == 1 and yarn != YaRN():
            names = "original_max_positions, beta_fast, beta_slow, attention_factor and truncate"
            rule = f"factor above 1 with {names} of YaRN"
            raise refusal(name, rule, yarn.factor, "set factor or leave them out")
        self.theta, self.magnitude = float(theta), magnitude_of(yarn)
        self.scaling = None if yarn.factor == 1 else ramp_of(name, yarn, theta, self.size)
