"""YaRN: fast pairs of RoPE are kept, slow ones interpolated, with a ramp between them, and a
temperature (Peng et al. 2023, YaRN, 3.2 to 3.4).
"""

import math
from typing import Literal, Optional, Tuple

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Layout, Place, Rotary, RotationOracle
from posenc_export.shared.refusal import refusal

Truncate = Literal["yes", "no"]
Temperature = Literal["rotation", "scores"]


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
        mscale, mscale_all_dim: as in DeepSeek; 0 if not given.
        truncate: "yes" rounds the ends of a ramp in pairs to whole pairs, as the authors do; "no",
            as gpt-oss.
        theta, layout, rotary: see RoPE.
        temperature: "rotation" applies attention_factor to cos and sin only. "scores" also scales
            all scores by m(mscale_all_dim)^2, including the part of entries that are not rotated,
            as DeepSeek.

    Raises:
        ValueError: temperature "scores" without mscale_all_dim.
    """

    least = {"factor": 1, "original_max_positions": 1, "mscale": 0, "mscale_all_dim": 0}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        if self.on_scores != 1.0:
            q = q * self.on_scores
        cos, sin = self.cos.rows, self.sin.rows
        return ops.rotate_both(q, k, positions, cos, sin, self.interleaved)

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
        attention_factor: Optional[float] = None,
        mscale: float = 0.0,
        mscale_all_dim: float = 0.0,
        truncate: Truncate = "yes",
        theta: float = 10000.0,
        layout: Layout = "half",
        rotary: Optional[int] = None,
        temperature: Temperature = "rotation",
    ) -> None:
        super().__init__(geometry, layout, rotary)
        if not theta > 1:
            raise refusal("rope_yarn", "theta above 1", theta)
        if not beta_fast > beta_slow > 0:
            rule = "beta_fast above beta_slow above 0"
            raise refusal("rope_yarn", rule, f"{beta_fast} and {beta_slow}")
        self.theta, self.factor, self.on_scores = float(theta), float(factor), 1.0
        length = original_max_positions
        first, last = (self.pair(turns, length) for turns in (beta_fast, beta_slow))
        if truncate == "yes":
            first, last = math.floor(first), math.ceil(last)
        self.low, self.high = max(first, 0), min(last, self.size - 1)
        of_all = _stretched(factor, mscale_all_dim)
        both = mscale and mscale_all_dim
        own = _stretched(factor, mscale) / of_all if both else _stretched(factor, 1.0)
        self.magnitude = own if attention_factor is None else float(attention_factor)
        if temperature == "scores":
            if not mscale_all_dim:
                rule = "mscale_all_dim above 0 with temperature=scores"
                raise refusal("rope_yarn", rule, mscale_all_dim, "set mscale_all_dim")
            if self.size == geometry.head_size:  # a fused kernel reads the tables alone
                self.magnitude *= of_all
            else:
                self.on_scores = of_all**2
        self.tabulate()

    def pair(self, turns: float, length: int) -> float:
        """The pair, as a real number, that makes `turns` turns within `length` tokens."""
        turning = math.log(length / (turns * 2 * math.pi))
        return self.size * turning / (2 * math.log(self.theta))


def _stretched(factor: float, scale: float) -> float:
    """m(scale) = 0.1 scale ln(factor) + 1, or 1 if factor is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


class RoPEYaRNOracle(RotationOracle, of=RoPEYaRN):
    """Scales queries after their rotation."""

    def rotate(self, x: np.ndarray, position: Place) -> np.ndarray:
        return self.encoding.on_scores * super().rotate(x, position)

    def rotate_key(self, x: np.ndarray, position: Place) -> np.ndarray:
        return super().rotate(x, position)
