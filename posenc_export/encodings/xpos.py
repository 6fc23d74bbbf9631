"""xPos: rotation with exponential decay (Sun et al. 2022, A Length-Extrapolatable Transformer,
2.2).
"""

from typing import Any, Mapping, Tuple

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Table
from posenc_export.encodings.shared.oracles import Rows
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

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        q_rows, k_rows = (self.q_cos.rows, self.q_sin.rows), (self.k_cos.rows, self.k_sin.rows)
        of_q = ops.rotate_pairs(q, positions, q_rows[0], q_rows[1], self.interleaved, False)
        of_k = ops.rotate_pairs(k, positions, k_rows[0], k_rows[1], self.interleaved, False)
        return of_q, of_k

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
        self.centre = geometry.max_positions // 2
        k = np.arange(0, self.size, 2) / self.size
        decay = np.log((k + gamma) / (1 + gamma))
        most = -decay.min() * (geometry.max_positions - self.centre) / scale_base
        if most > LARGEST:
            rule = f"factors of at most e^{LARGEST:.0f}"
            got = f"e^{most:.0f} at max_positions={geometry.max_positions}"
            raise refusal("xpos", rule, got, "set a larger scale_base")
        positions = np.arange(geometry.max_positions)[:, None]
        angles = positions * self.theta**-k
        factors = np.exp((positions - self.centre) / self.base * decay)
        self.q_cos, self.q_sin = Table(np.cos(angles) * factors), Table(np.sin(angles) * factors)
        self.k_cos, self.k_sin = Table(np.cos(angles) / factors), Table(np.sin(angles) / factors)


class XPosOracle(RotationOracle, of=XPos):
    def tables(self) -> Mapping[str, Rows]:
        e = self.encoding
        shares = [2 * k / e.size for k in range(e.size // 2)]
        bases = np.array([(share + e.gamma) / (1 + e.gamma) for share in shares])
        waves = super().tables()

        def grown(name: str, sign: int) -> Rows:
            return lambda p: waves[name](p) * bases ** (sign * (p - e.centre) / e.base)

        signs = (("q", 1), ("k", -1))
        names = {f"{kind}_{name}": (name, sign) for kind, sign in signs for name in waves}
        return {table: grown(name, sign) for table, (name, sign) in names.items()}

    def rotate(self, x: np.ndarray, position: Any) -> np.ndarray:
        return self.rotated(x, position, "q")

    def rotate_key(self, x: np.ndarray, position: Any) -> np.ndarray:
        return self.rotated(x, position, "k")

    def rotated(self, x: np.ndarray, position: int, kind: str) -> np.ndarray:
        cos, sin = self.row_of(f"{kind}_cos", position), self.row_of(f"{kind}_sin", position)
        return multiply_pairs(x, cos + 1j * sin, self.encoding.interleaved)
