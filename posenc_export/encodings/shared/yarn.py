"""YaRN scaling of rotations: the ramp between kept and interpolated pairs, and the temperature (Peng et al. 2023, YaRN, 3.2 to 3.4)."""

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from posenc_export.encodings.shared.rotary import check_choice, inverse_powers

TRUNCATE, RAMPS = ("yes", "no"), ("pairs", "turns")
UNSCALED = (32768, 32.0, 1.0, None, "yes")  # defaults of the YaRN parameters of rotations by coordinates


@dataclass(frozen=True)
class Ramp:
    """Scaled frequencies (1 - g_k) w_k + g_k w_k / factor, where g_k grows from 0 to 1 along the pairs.

    Args:
        factor: factor by which the range is extended.
        length: L, tokens the model was trained on.
        low, high: pairs between which g_k grows from 0 to 1; if by_turns, numbers of turns within L between which g_k falls from 1 to 0.
        by_turns: whether low and high are numbers of turns.
    """

    factor: float
    length: int
    low: float
    high: float
    by_turns: bool

    def frequencies(self, powers: Tensor) -> Tensor:
        """powers 1 / w_k [r/2] to scaled frequencies [r/2], in the dtype of powers."""
        if self.by_turns:
            interpolated = 1 - ((self.length / (2 * math.pi * powers) - self.low) / (self.high - self.low)).clamp(0, 1)
        else:
            interpolated = ((torch.arange(len(powers), dtype=powers.dtype) - self.low) / (self.high - self.low or 0.001)).clamp(0, 1)
        kept = 1 - interpolated
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def frequency(self, kept: float, k: int) -> float:
        """The scaled frequency of pair k, float64; kept is w_k."""
        at = self.length * kept / (2 * math.pi) if self.by_turns else k
        along = min(max((at - self.low) / ((self.high - self.low) or 0.001), 0.0), 1.0)
        share = 1 - along if self.by_turns else along
        return kept * (1 - share + share / self.factor)


def ramp_of(
    name: str, size: int, theta: float, factor: float, length: int, beta_fast: float, beta_slow: float, truncate: str, ramp: str = "pairs"
) -> Ramp:
    """The ramp for rotary size r and base theta. For the arguments see RoPEYaRN.

    Raises:
        ValueError: theta not above 1, factor or length below 1, beta_fast not above beta_slow, unknown truncate or ramp, truncate "no" with ramp "turns".
    """
    if not 1 < theta < math.inf or not 1 <= factor < math.inf or length < 1:
        raise ValueError(f"{name}: expected theta above 1, factor and original_max_positions of at least 1, got {theta}, {factor} and {length}")
    if not beta_fast > beta_slow > 0:
        raise ValueError(f"{name}: expected beta_fast above beta_slow above 0, got {beta_fast} and {beta_slow}")
    check_choice(name, "truncate", truncate, TRUNCATE)
    check_choice(name, "ramp", ramp, RAMPS)
    if ramp == "turns":
        if truncate == "no":
            raise ValueError(f"{name}: expected truncate=yes with ramp=turns, which has no ends in pairs, got truncate=no; leave it out")
        return Ramp(float(factor), length, float(beta_slow), float(beta_fast), True)
    first, last = (_pair(turns, size, float(theta), length) for turns in (beta_fast, beta_slow))
    if truncate == "yes":
        first, last = math.floor(first), math.ceil(last)
    return Ramp(float(factor), length, max(first, 0), min(last, size - 1), False)


def optional_ramp(
    name: str, size: int, theta: float, factor: float, length: int, beta_fast: float, beta_slow: float, attention_factor: Optional[float], truncate: str
) -> Optional[Ramp]:
    """The ramp of a rotation by coordinates; None if factor is 1.

    Raises:
        ValueError: see ramp_of; a parameter of YaRN that is set with a factor of 1.
    """
    if factor != 1:
        return ramp_of(name, size, theta, factor, length, beta_fast, beta_slow, truncate)
    if (length, beta_fast, beta_slow, attention_factor, truncate) != UNSCALED:
        names = "original_max_positions, beta_fast, beta_slow, attention_factor and truncate"
        raise ValueError(f"{name}: expected factor above 1 with {names} of YaRN, got {factor}; set factor or leave them out")
    return None


def scaled_powers(theta: float, size: int, dtype: torch.dtype, scaling: Optional[Ramp]) -> Tensor:
    """Frequencies theta^(-2k/r) [r/2], scaled along the ramp unless it is None.

    Raises:
        ValueError: a theta that is not finite.
    """
    if scaling is None:
        return inverse_powers(theta, size, dtype)
    return scaling.frequencies(theta ** (torch.arange(0, size, 2, dtype=dtype) / size))


def magnitude_of(factor: float, given: Optional[float], mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """The factor on cos and sin: `given`, else m(mscale) / m(mscale_all_dim) if both are above 0, else m(1)."""
    if given is not None:
        return float(given)
    return stretched(factor, mscale) / stretched(factor, mscale_all_dim) if mscale > 0 and mscale_all_dim > 0 else stretched(factor, 1.0)


def stretched(factor: float, scale: float) -> float:
    """m(scale) = 0.1 scale ln(factor) + 1, or 1 if factor is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _pair(turns: float, size: int, theta: float, length: int) -> float:
    """The pair, as a real number, that makes `turns` turns within `length` tokens."""
    return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
