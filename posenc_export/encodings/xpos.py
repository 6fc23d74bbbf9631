"""xPos: rotation with exponential decay (Sun et al. 2022, A Length-Extrapolatable Transformer, 2.2)."""

import cmath
import math
from typing import Tuple

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table
from posenc_export.encodings.shared.rotary import LAYOUTS, check_choice, rotary_size

LARGEST = 41.0  # exponent of e: the product of a far key and a near query, computed before masking, must stay below e^88, the limit of float32


class XPos(PositionEncoding):
    """RoPE with pair k of queries scaled by z_k^((p - c) / scale_base) and of keys by its inverse, z_k = (2k/D + gamma) / (1 + gamma): scores decay with distance.

    The centre c is max_positions / 2. It is fixed, because a centre that depends on the length would change cached keys. Scores depend on i - j only, but
    factors grow with the distance from the centre, which limits the range; float16 caches allow ranges up to about 8192.

    Hook: rotate. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: head size D, even; max_positions.
        theta, layout: see RoPE.
        gamma: offset of z_k, 0.4 in the paper.
        scale_base: unit of the decay in tokens, 512 in the paper.

    Raises:
        ValueError: odd head size, unknown layout, theta, gamma or scale_base not above 0, a range whose factors overflow float32.
    """

    def __init__(self, geometry: Geometry, theta: float = 10000.0, layout: str = "half", gamma: float = 0.4, scale_base: float = 512.0) -> None:
        super().__init__()
        size = rotary_size("xpos", geometry, None)
        check_choice("xpos", "layout", layout, LAYOUTS)
        if not theta > 0 or not gamma > 0 or not scale_base > 0:
            raise ValueError(f"xpos: expected theta, gamma and scale_base above 0, got {theta}, {gamma} and {scale_base}")
        self.theta, self.gamma, self.base, self.size = float(theta), float(gamma), float(scale_base), size
        self.interleaved, self.centre = layout == "interleaved", geometry.max_positions // 2
        k = np.arange(0, size, 2) / size
        decay = np.log((k + gamma) / (1 + gamma))
        most = -decay.min() * (geometry.max_positions - self.centre) / scale_base
        if most > LARGEST:
            rule = f"factors of at most e^{LARGEST:.0f}"
            raise ValueError(f"xpos: expected {rule}, got e^{most:.0f} at max_positions={geometry.max_positions}; set a larger scale_base")
        positions = np.arange(geometry.max_positions)[:, None]
        angles, factors = positions * self.theta**-k, np.exp((positions - self.centre) / self.base * decay)
        self.q_cos, self.q_sin = Table(np.cos(angles) * factors), Table(np.sin(angles) * factors)
        self.k_cos, self.k_sin = Table(np.cos(angles) / factors), Table(np.sin(angles) / factors)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        return (
            ops.rotate_pairs(q, positions, self.q_cos.rows, self.q_sin.rows, self.interleaved, False),
            ops.rotate_pairs(k, positions, self.k_cos.rows, self.k_sin.rows, self.interleaved, False),
        )

    def oracle(self) -> Oracle:
        return XPosOracle(self)


class XPosOracle(Oracle):
    def __init__(self, encoding: XPos) -> None:
        self.encoding = encoding

    def turned(self, x: np.ndarray, position: int, sign: int) -> np.ndarray:
        e, out = self.encoding, x.copy()
        for k in range(e.size // 2):
            a, b = (2 * k, 2 * k + 1) if e.interleaved else (k, k + e.size // 2)
            factor = math.pow((2 * k / e.size + e.gamma) / (1 + e.gamma), sign * (position - e.centre) / e.base)
            wave = factor * complex(x[a], x[b]) * cmath.exp(1j * position / math.pow(e.theta, 2 * k / e.size))
            out[a], out[b] = wave.real, wave.imag
        return out

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        return self.turned(x, position, 1)

    def rotate_key(self, x: np.ndarray, position: int) -> np.ndarray:
        return self.turned(x, position, -1)
