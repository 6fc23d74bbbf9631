"""YaRN: fast pairs of RoPE are kept, slow ones interpolated, with a ramp between them, and a temperature (Peng et al. 2023, YaRN, 3.2 to 3.4)."""

import math
from typing import Optional, Tuple

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle
from posenc_export.encodings.shared.rotary import LAYOUTS, Rotary, RotaryOracle, check_choice, dtype_of, rotary_size
from posenc_export.encodings.shared.yarn import magnitude_of, ramp_of, scaled_powers, stretched

TEMPERATURES = ("rotation", "scores", "off")


class RoPEYaRN(Rotary):
    """w_k = (1 - g_k) theta^(-2k/r) + g_k theta^(-2k/r) / factor; cos and sin are scaled by attention_factor.

    The ramp g_k grows from 0 at the pair that turns beta_fast times within the trained length L to 1 at the pair that turns beta_slow times. It is linear in
    the pair k or in the number of turns.

    Hook: rotate. State: none. Range: 0 .. max_positions - 1. Scores depend on the difference of positions only.

    Args:
        geometry: head size D.
        factor: factor by which the range is extended.
        original_max_positions: L, tokens the model was trained on.
        beta_fast, beta_slow: ends of the ramp, in turns within L.
        attention_factor: if not given, m(mscale) / m(mscale_all_dim) if both are above 0, else m(1); m(s) = 0.1 s ln(factor) + 1.
        mscale, mscale_all_dim: as in DeepSeek; 0 if not given.
        truncate: "yes" rounds the ends of a ramp in pairs to whole pairs, as the authors do; "no", as gpt-oss.
        theta, layout, rotary, numerics: see RoPE.
        ramp: "pairs", as the authors' code, or "turns", as the text of the paper (3.2).
        temperature: "rotation" applies attention_factor to cos and sin only. "scores" also scales all scores by m(mscale_all_dim)^2, including the part of
            entries that are not rotated, as DeepSeek. "off" applies neither.

    Raises:
        ValueError: see RoPE; factor or L below 1, beta_fast not above beta_slow, unknown truncate, ramp or temperature, truncate "no" with ramp "turns",
            temperature "scores" without mscale_all_dim, temperature "off" with attention_factor, mscale or mscale_all_dim.
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
        ramp: str = "pairs",
        temperature: str = "rotation",
    ) -> None:
        size, dtype = rotary_size("rope_yarn", geometry, rotary), dtype_of("rope_yarn", numerics)
        check_choice("rope_yarn", "layout", layout, LAYOUTS)
        scaling = ramp_of("rope_yarn", size, theta, factor, original_max_positions, beta_fast, beta_slow, truncate, ramp)
        magnitude, on_scores = _temperatures(factor, temperature, attention_factor, mscale, mscale_all_dim)
        if size == geometry.head_size:  # all entries are rotated: fold the factor on scores into the tables, which a fused kernel reads
            magnitude, on_scores = magnitude * math.sqrt(on_scores), 1.0
        super().__init__(geometry, scaled_powers(float(theta), size, dtype, scaling), layout, magnitude)
        self.theta, self.factor, self.scaling, self.on_scores = float(theta), float(factor), scaling, on_scores

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        if self.on_scores != 1.0:
            q = q * self.on_scores
        return ops.rotate_both(q, k, positions, self.cos.rows, self.sin.rows, self.interleaved, self.linear)

    def frequency(self, k: int) -> float:
        return self.scaling.frequency(1 / math.pow(self.theta, 2 * k / self.size), k)

    def oracle(self) -> Oracle:
        plain = super().oracle()
        assert isinstance(plain, RotaryOracle)
        return plain if self.on_scores == 1.0 else RoPEYaRNOracle(plain, self.on_scores)


class RoPEYaRNOracle(Oracle):
    """Scales queries after their rotation."""

    def __init__(self, rotation: RotaryOracle, on_scores: float) -> None:
        self.rotation, self.on_scores = rotation, on_scores

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        return self.on_scores * self.rotation.rotate(x, position)

    def rotate_key(self, x: np.ndarray, position: int) -> np.ndarray:
        return self.rotation.rotate(x, position)


def _temperatures(factor: float, temperature: str, given: Optional[float], mscale: float, mscale_all_dim: float) -> Tuple[float, float]:
    """The factor on cos and sin, and the factor on scores."""
    check_choice("rope_yarn", "temperature", temperature, TEMPERATURES)
    if mscale < 0 or mscale_all_dim < 0:
        raise ValueError(f"rope_yarn: expected mscale and mscale_all_dim of 0 or more, got {mscale} and {mscale_all_dim}")
    if temperature == "off":
        if given is not None or mscale or mscale_all_dim:
            found = f"attention_factor={given}, mscale={mscale} and mscale_all_dim={mscale_all_dim}"
            raise ValueError(f"rope_yarn: expected no attention_factor, mscale or mscale_all_dim with temperature=off, got {found}; leave them out")
        return 1.0, 1.0
    if temperature == "scores" and not mscale_all_dim:
        raise ValueError(f"rope_yarn: expected mscale_all_dim above 0 with temperature=scores, got {mscale_all_dim}; set mscale_all_dim")
    return magnitude_of(factor, given, mscale, mscale_all_dim), stretched(factor, mscale_all_dim) ** 2 if temperature == "scores" else 1.0
