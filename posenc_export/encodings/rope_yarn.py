"""YaRN: fast pairs of RoPE are kept, slow ones interpolated, with a ramp between them, and a
temperature (Peng et al. 2023, YaRN, 3.2 to 3.4).
"""

import math
from typing import Literal, Optional, Tuple

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import (
    Layout,
    Numerics,
    Place,
    Rotary,
    RotationOracle,
    dtype_of,
    rotary_size,
)
from posenc_export.encodings.shared.yarn import (
    RampBy,
    Truncate,
    magnitude_of,
    ramp_of,
    scaled_powers,
    stretched,
)

Temperature = Literal["rotation", "scores", "off"]


class RoPEYaRN(Rotary):
    """w_k = (1 - g_k) theta^(-2k/r) + g_k theta^(-2k/r) / factor; cos and sin are scaled by
    attention_factor.

    The ramp g_k grows from 0 at the pair that turns beta_fast times within the trained length L to
    1 at the pair that turns beta_slow times. It is linear in the pair k or in the number of turns.

    Hook: rotate. State: none. Range: 0 .. max_positions - 1. Scores depend on the difference of
    positions only.

    Args:
        geometry: head size D.
        factor: factor by which the range is extended.
        original_max_positions: L, tokens the model was trained on.
        beta_fast, beta_slow: ends of the ramp, in turns within L.
        attention_factor: if not given, m(mscale) / m(mscale_all_dim) if both are above 0, else
            m(1); m(s) = 0.1 s ln(factor) + 1.
        mscale, mscale_all_dim: as in DeepSeek; 0 if not given.
        truncate: "yes" rounds the ends of a ramp in pairs to whole pairs, as the authors do; "no",
            as gpt-oss.
        theta, layout, rotary, numerics: see RoPE.
        ramp: "pairs", as the authors' code, or "turns", as the text of the paper (3.2).
        temperature: "rotation" applies attention_factor to cos and sin only. "scores" also scales
            all scores by m(mscale_all_dim)^2, including the part of entries that are not rotated,
            as DeepSeek. "off" applies neither.

    Raises:
        ValueError: see RoPE; factor or L below 1, beta_fast not above beta_slow, unknown truncate,
            ramp or temperature, truncate "no" with ramp "turns", temperature "scores" without
            mscale_all_dim, temperature "off" with attention_factor, mscale or mscale_all_dim.
    """

    least = {"factor": 1, "original_max_positions": 1, "mscale": 0, "mscale_all_dim": 0}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        if self.on_scores != 1.0:
            q = q * self.on_scores
        return ops.rotate_both(
            q, k, positions, self.cos.rows, self.sin.rows, self.interleaved, self.linear
        )

    def frequency(self, k: int) -> float:
        return self.scaling.frequency(1 / math.pow(self.theta, 2 * k / self.size), k)

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
        numerics: Numerics = "exact",
        ramp: RampBy = "pairs",
        temperature: Temperature = "rotation",
    ) -> None:
        size, dtype = rotary_size("rope_yarn", geometry, rotary), dtype_of(numerics)
        scaling = ramp_of(
            "rope_yarn",
            size,
            theta,
            factor,
            original_max_positions,
            beta_fast,
            beta_slow,
            truncate,
            ramp,
        )
        magnitude, on_scores = _temperatures(
            factor, temperature, attention_factor, mscale, mscale_all_dim
        )
        # All entries are rotated: fold the factor on scores into the tables, which a fused kernel
        # reads.
        if size == geometry.head_size:
            magnitude, on_scores = magnitude * math.sqrt(on_scores), 1.0
        super().__init__(
            geometry, scaled_powers(float(theta), size, dtype, scaling), layout, magnitude
        )
        self.theta, self.factor, self.scaling, self.on_scores = (
            float(theta),
            float(factor),
            scaling,
            on_scores,
        )


class RoPEYaRNOracle(RotationOracle, of=RoPEYaRN):
    """Scales queries after their rotation."""

    def rotate(self, x: np.ndarray, position: Place) -> np.ndarray:
        return self.encoding.on_scores * super().rotate(x, position)  # type: ignore[no-any-return]

    def rotate_key(self, x: np.ndarray, position: Place) -> np.ndarray:
        return super().rotate(x, position)


def _temperatures(
    factor: float,
    temperature: Temperature,
    given: Optional[float],
    mscale: float,
    mscale_all_dim: float,
) -> Tuple[float, float]:
    """The factor on cos and sin, and the factor on scores."""
    if temperature == "off":
        if given is not None or mscale or mscale_all_dim:
            found = f"attention_factor={given}, mscale={mscale} and mscale_all_dim={mscale_all_dim}"
            raise ValueError(
                "rope_yarn: expected no attention_factor, mscale or mscale_all_dim with "
                f"temperature=off, got {found}; leave them out"
            )
        return 1.0, 1.0
    if temperature == "scores" and not mscale_all_dim:
        raise ValueError(
            "rope_yarn: expected mscale_all_dim above 0 with temperature=scores, got "
            f"{mscale_all_dim}; set mscale_all_dim"
        )
    return magnitude_of(factor, given, mscale, mscale_all_dim), stretched(
        factor, mscale_all_dim
    ) ** 2 if temperature == "scores" else 1.0
