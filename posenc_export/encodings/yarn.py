"""What rotations scaled by YaRN share: the ramp between pairs that are kept and pairs that are interpolated, and the temperature (Peng et al. 2023, YaRN, 3.2 to 3.4)."""

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from posenc_export.encodings.rotary import check_choice, inverse_powers

TRUNCATE, RAMPS = ("yes", "no"), ("pairs", "turns")
UNSCALED = (32768, 32.0, 1.0, None, "yes")  # what rotations by coordinates have where YaRN does not scale them


@dataclass(frozen=True)
class Ramp:
    """(1 - g_k) w_k + g_k w_k / factor, g_k from 0 to 1 along the pairs.

    Args:
        factor: by how much the range is stretched.
        length: L, tokens the model was trained on.
        low, high: pairs between which g_k grows from 0 to 1, or numbers of turns within L between which it falls from 1 to 0.
        by_turns: which of the two.
    """

    factor: float
    length: int
    low: float
    high: float
    by_turns: bool

    def frequencies(self, powers: Tensor) -> Tensor:
        """1 / w_k [r/2] to scaled frequencies [r/2], in the dtype of powers."""
        if self.by_turns:
            interpolated = 1 - ((self.length / (2 * math.pi * powers) - self.low) / (self.high - self.low)).clamp(0, 1)
        else:
            interpolated = ((torch.arange(len(powers), dtype=powers.dtype) - self.low) / (self.high - self.low or 0.001)).clamp(0, 1)
        kept = 1 - interpolated
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def frequency(self, kept: float, k: int) -> float:
        """w_k to that of the scaled pair k, float64."""
        at = self.length * kept / (2 * math.pi) if self.by_turns else k
        along = min(max((at - self.low) / ((self.high - self.low) or 0.001), 0.0), 1.0)
        share = 1 - along if self.by_turns else along
        return kept * (1 - share + share / self.factor)


def ramp_of(
    name: str, size: int, theta: float, factor: float, length: int, beta_fast: float, beta_slow: float, truncate: str, ramp: str = "pairs"
) -> Ramp:
    """The ramp of rotary size r and base theta. Arguments as RoPEYaRN.

    Raises:
        ValueError: theta not above 1, a factor or a length below 1, beta_fast not above beta_slow, unknown truncate or ramp, truncate "no" for a ramp in turns.
    """
    if not 1 < theta < math.inf or not 1 <= factor < math.inf or length < 1:
        raise ValueError(f"{name}: theta above 1, factor and original_max_positions at least 1, got {theta}, {factor} and {length}")
    if not beta_fast > beta_slow > 0:
        raise ValueError(f"{name}: beta_fast is above beta_slow, which is above 0, got {beta_fast} and {beta_slow}")
    check_choice(name, "truncate", truncate, TRUNCATE)
    check_choice(name, "ramp", ramp, RAMPS)
    if ramp == "turns":
        if truncate == "no":
            raise ValueError(f"{name}: truncate is yes for a ramp in turns, which has no ends in pairs, got no; leave it out")
        return Ramp(float(factor), length, float(beta_slow), float(beta_fast), True)
    first, last = (_pair(turns, size, float(theta), length) for turns in (beta_fast, beta_slow))
    if truncate == "yes":
        first, last = math.floor(first), math.ceil(last)
    return Ramp(float(factor), length, max(first, 0), min(last, size - 1), False)


def optional_ramp(
    name: str, size: int, theta: float, factor: float, length: int, beta_fast: float, beta_slow: float, attention_factor: Optional[float], truncate: str
) -> Optional[Ramp]:
    """The ramp of a rotation by coordinates; None where factor is 1.

    Raises:
        ValueError: as ramp_of; a parameter of YaRN beside a factor of 1.
    """
    if factor != 1:
        return ramp_of(name, size, theta, factor, length, beta_fast, beta_slow, truncate)
    if (length, beta_fast, beta_slow, attention_factor, truncate) != UNSCALED:
        names = "original_max_positions, beta_fast, beta_slow, attention_factor and truncate"
        raise ValueError(f"{name}: factor is above 1 beside {names} of YaRN, got {factor}; set factor or leave them out")
    return None


def scaled_powers(theta: float, size: int, dtype: torch.dtype, scaling: Optional[Ramp]) -> Tensor:
    """theta^(-2k/r) [r/2], along the ramp where there is one.

    Raises:
        ValueError: a theta that is not finite.
    """
    if scaling is None:
        return inverse_powers(theta, size, dtype)
    return scaling.frequencies(theta ** (torch.arange(0, size, 2, dtype=dtype) / size))


def magnitude_of(factor: float, given: Optional[float], mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """The factor on cos and sin: as given, or else m(mscale) / m(mscale_all_dim) if both are above 0, or else m(1)."""
    if given is not None:
        return float(given)
    return stretched(factor, mscale) / stretched(factor, mscale_all_dim) if mscale > 0 and mscale_all_dim > 0 else stretched(factor, 1.0)


def stretched(factor: float, scale: float) -> float:
    """m(scale) = 0.1 scale ln(factor) + 1, or 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _pair(turns: float, size: int, theta: float, length: int) -> float:
    """The pair, as a real number, that turns `turns` times within `length` tokens."""
    return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
