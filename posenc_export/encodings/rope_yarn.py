"""YaRN: fast pairs of RoPE are kept, slow ones interpolated, with a ramp between them, and a
temperature (Peng et al. 2023, YaRN, 3.2 to 3.4).
"""

import math
from typing import Literal

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, Rotary
from posenc_export.shared.refusal import refusal


class RoPEYaRN(Rotary):
    """w_k = (1 - g_k) theta^(-2k/r) + g_k theta^(-2k/r) / factor; cos and sin are scaled by
    attention_factor.

    The ramp g_k grows from 0 at the pair that turns beta_fast times within the trained length L to
    1 at the pair that turns beta_slow times. It is linear in the pair k, as in the authors' code;
    `rope_llama3` has one that is linear in the number of turns, as in the text of the paper (3.2).

    Scores depend on the difference of positions only.

    Args:
        geometry: head size D.
        factor: factor by which the range is extended.
        original_max_positions: L, tokens the model was trained on.
        beta_fast, beta_slow: ends of the ramp, in turns within L, the first above the second.
        attention_factor: if not given, m(mscale) / m(mscale_all_dim) if both are above 0, else
            m(1); m(s) = 0.1 s ln(factor) + 1. 1 for no temperature.
        mscale, mscale_all_dim: as in DeepSeek, whose `scale` of the attention has the further
            factor m(mscale_all_dim)^2; 0 if not given.
        truncate: "yes" rounds the ends of the ramp to whole pairs, as the authors do; "no" does
            not, as in gpt-oss.
        theta, layout, rotary: see RoPE.
    """

    least = {"factor": 1, "original_max_positions": 1, "mscale": 0, "mscale_all_dim": 0}

    def frequency(self, k: int) -> float:
        share = min(max((k - self.low) / ((self.high - self.low) or 0.001), 0.0), 1.0)
        return 1 / math.pow(self.theta, 2 * k / self.size) * (1 - share + share / self.factor)

    def __init__(
        self,
        geometry: Geometry,
        factor: float = 4.0,
        original_max_positions: int = 2048,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        mscale: float = 0.0,
        mscale_all_dim: float = 0.0,
        truncate: Literal["yes", "no"] = "yes",
        theta: float = 10000.0,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        super().__init__(geometry, layout, rotary)
        if not theta > 1:
            raise refusal("rope_yarn", "theta above 1", theta)
        if not beta_fast > beta_slow > 0:
            rule = "beta_fast above beta_slow above 0"
            raise refusal("rope_yarn", rule, f"{beta_fast} and {beta_slow}")
        self.theta, self.factor = float(theta), float(factor)
        length = original_max_positions
        first, last = (self.pair(turns, length) for turns in (beta_fast, beta_slow))
        if truncate == "yes":
            first, last = math.floor(first), math.ceil(last)
        self.low, self.high = max(first, 0), min(last, self.size - 1)
        both = mscale and mscale_all_dim
        scales = (mscale, mscale_all_dim) if both else (1.0, 0.0)
        own = _stretched(factor, scales[0]) / _stretched(factor, scales[1])
        self.magnitude = own if attention_factor is None else float(attention_factor)
        self.tabulate()

    def pair(self, turns: float, length: int) -> float:
        """The pair, as a real number, that makes `turns` turns within `length` tokens."""
        turning = math.log(length / (turns * 2 * math.pi))
        return self.size * turning / (2 * math.log(self.theta))


def _stretched(factor: float, scale: float) -> float:
    """m(scale) = 0.1 scale ln(factor) + 1, or 1 if factor is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
