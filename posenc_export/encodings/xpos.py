"""xPos: rotation with exponential decay (Sun et al. 2022, A Length-Extrapolatable Transformer,
2.2).
"""

import math
from typing import Any, Mapping

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Rows
from posenc_export.encodings.shared.rotary import Layout, Rotation, RotationOracle, multiply_pairs
from posenc_export.shared.refusal import refusal

# Exponent of e: the product of a far key and a near query, computed before masking, must stay below
# e^88, the limit of float32.
LARGEST = 41.0


class XPos(Rotation):
    """RoPE with pair k of queries scaled by z_k^((p - c) / scale_base) and of keys by its inverse,
    z_k = (2k/D + gamma) / (1 + gamma): scores decay with distance.

    The centre c is max_positions / 2. It is fixed, because a centre that depends on the length
    would change cached keys. Scores depend on i - j only, but factors grow with the distance from
    the centre, which limits the range; float16 caches allow ranges up to about 8192.

    Args:
        geometry: head size D, even; max_positions.
        theta, layout: see RoPE.
        gamma: offset of z_k, 0.4 in the paper.
        scale_base: unit of the decay in tokens, 512 in the paper.

    Raises:
        ValueError: a range whose factors overflow float32.
    """

    above = {"theta": 0, "gamma": 0, "scale_base": 0}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        q_rows, k_rows = (self.q_cos.rows, self.q_sin.rows), (self.k_cos.rows, self.k_sin.rows)
        of_q = ops.rotate_pairs(q, positions, q_rows[0], q_rows[1], self.interleaved, False)
        of_k = ops.rotate_pairs(k, positions, k_rows[0], k_rows[1], self.interleaved, False)
        return of_q, of_k

    def formulas(self) -> Mapping[str, Rows]:
        k = np.arange(0, self.size, 2) / self.size
        decay = np.log((k + self.gamma) / (1 + self.gamma)) / self.base

        def grown(wave: Rows, sign: int) -> Rows:
            return lambda p: wave(p * self.theta**-k) * np.exp(sign * (p - self.centre) * decay)

        waves, signs = (("cos", np.cos), ("sin", np.sin)), (("q", 1), ("k", -1))
        return {f"{of}_{name}": grown(wave, sign) for of, sign in signs for name, wave in waves}

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10000.0,
        layout: Layout = "half",
        gamma: float = 0.4,
        scale_base: float = 512.0,
    ) -> None:
        super().__init__(geometry, layout)
        self.theta, self.gamma, self.base = float(theta), float(gamma), float(scale_base)
        self.centre = self.count // 2
        most = math.log((1 + gamma) / gamma) * (self.count - self.centre) / scale_base
        if most > LARGEST:
            rule = f"factors of at most e^{LARGEST:.0f}"
            got = f"e^{most:.0f} at max_positions={geometry.max_positions}"
            raise refusal("xpos", rule, got, "set a larger scale_base")
        self.q_cos, self.q_sin = self.filled("q_cos", self.count), self.filled("q_sin", self.count)
        self.k_cos, self.k_sin = self.filled("k_cos", self.count), self.filled("k_sin", self.count)


class XPosOracle(RotationOracle, of=XPos):
    def rotate(self, x: np.ndarray, position: Any) -> np.ndarray:
        return self.grown(super().rotate(x, position), position)

    def rotate_key(self, x: np.ndarray, position: Any) -> np.ndarray:
        return self.grown(super().rotate(x, position), position, -1)

    def grown(self, x: np.ndarray, position: int, sign: int = 1) -> np.ndarray:
        """Scale the pairs of rotated x [D]."""
        e = self.encoding
        bases = [(2 * k / e.size + e.gamma) / (1 + e.gamma) for k in range(e.size // 2)]
        power = sign * (position - e.centre) / e.base
        return multiply_pairs(x, [base**power for base in bases], e.interleaved)
