"""Dynamic NTK scaling of RoPE: the base grows with the length seen (emozilla 2023, in transformers as rope_type "dynamic")."""

import cmath
import math
from typing import List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table

LAYOUTS = ("half", "interleaved")
KEYS = ("raw", "rotated")


class RoPEDynamic(PositionEncoding):
    """A query that has seen n = i + 1 tokens turns by w_k(n) = theta_n^(-2k/r), and so do all keys it looks at;
    theta_n = theta (factor n / L - factor + 1)^(r/(r-2)) where n is above L, theta up to there.

    Keys are cached raw and turned when read, by the query's own frequencies: one token at a time, in chunks and at once are the same.
    Memory beside the scores: [B,H,S,T,r/2] numbers in a call, hence the small chunk. With keys="rotated" they are cached as turned by the length
    at which they came, which is what transformers does when it decodes: scores across the switch then mix frequencies.

    Hook: rescore (rotate for rotated keys). State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: head size D, heads.
        theta: base up to the original length.
        factor: by how much the base may stretch the range.
        original_max_positions: L, tokens the model was trained on.
        layout, rotary: as RoPE.
        keys: "raw" or "rotated".

    Raises:
        ValueError: odd or too large rotary size (or 2, where the exponent has no value), unknown layout or keys, factor below 1, L below 1.
    """

    chunk = 8

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10000.0,
        factor: float = 2.0,
        original_max_positions: int = 2048,
        layout: str = "half",
        rotary: Optional[int] = None,
        keys: str = "raw",
    ) -> None:
        super().__init__()
        self.of_head: Tensor
        size = geometry.head_size if rotary is None else rotary
        if size % 2 or not 4 <= size <= geometry.head_size:
            raise ValueError(f"rope_dynamic: rotary size is even and 4 .. head size {geometry.head_size}, got {size}; set rotary=R or another head size")
        for name, value, choices in (("layout", layout, LAYOUTS), ("keys", keys, KEYS)):
            if value not in choices:
                raise ValueError(f"rope_dynamic: {name} is one of {', '.join(choices)}, got {value!r}")
        if not factor >= 1 or not theta > 0 or original_max_positions < 1:
            raise ValueError(
                f"rope_dynamic: factor is at least 1, theta above 0, original_max_positions at least 1, got {factor}, {theta}, {original_max_positions}"
            )
        self.theta, self.factor, self.original = float(theta), float(factor), original_max_positions
        self.interleaved, self.size, self.keys = layout == "interleaved", size, keys
        seen = np.maximum(np.arange(1, geometry.max_positions + 1, dtype=np.float64), self.original)
        bases = self.theta * (self.factor * seen / self.original - (self.factor - 1)) ** (size / (size - 2))
        frequencies = bases[:, None] ** (-np.arange(0, size, 2) / size)
        self.register_buffer("of_head", torch.arange(geometry.heads) // (geometry.heads // (geometry.kv_heads or geometry.heads)), persistent=False)
        if keys == "rotated":
            angles = np.arange(geometry.max_positions)[:, None] * frequencies
            self.first, self.second = Table(np.cos(angles)), Table(np.sin(angles))
        else:  # two float32 parts: their product with a distance is exact in float64
            leading = frequencies.astype(np.float32)
            self.first, self.second = Table(leading), Table(frequencies - leading)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same; raw keys and their queries stay as they are."""
        if self.keys == "raw":
            return q, k
        cos, sin = self.first.rows, self.second.rows
        return ops.rotate_pairs(q, positions, cos, sin, self.interleaved, False), ops.rotate_pairs(k, positions, cos, sin, self.interleaved, False)

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        """q [B,S,H,D], keys and values [B,K,T,D] to [B,S,H*D]; raw keys turned by their distance to each query."""
        if self.keys == "rotated":
            return ops.attend(q, keys, values, mask, None, scale)
        frequencies = self.first(positions).to(torch.float64) + self.second(positions).to(torch.float64)
        distances = ops.distances(positions, key_positions).to(torch.float64)
        angles = ops.reduced_angle(distances.unsqueeze(4) * frequencies.unsqueeze(1).unsqueeze(3))
        a, b = self.pairs(q.to(torch.float32).transpose(1, 2).unsqueeze(3))
        c, d = self.pairs(keys.index_select(1, self.of_head).to(torch.float32).unsqueeze(2))
        scores = ((a * c + b * d) * angles.cos() + (b * c - a * d) * angles.sin()).sum(-1)
        if self.size < q.size(3):
            scores = scores + ops.products(q[..., self.size :], keys[..., self.size :])
        return ops.mix(ops.shares(scale * scores, mask), values)

    def pairs(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """First and second entries of the rotated pairs of x [...,D]: [...,r/2] twice."""
        if self.interleaved:
            return x[..., 0 : self.size : 2], x[..., 1 : self.size : 2]
        return x[..., : self.size // 2], x[..., self.size // 2 : self.size]

    def oracle(self) -> Oracle:
        return RoPEDynamicOracle(self)


class RoPEDynamicOracle(Oracle):
    def __init__(self, encoding: RoPEDynamic) -> None:
        self.encoding = encoding

    def frequency(self, k: int, seen: int) -> float:
        e, base = self.encoding, self.encoding.theta
        if seen > e.original:
            base *= math.pow(e.factor * seen / e.original - e.factor + 1, e.size / (e.size - 2))
        return math.pow(base, -2 * k / e.size)

    def turned(self, x: np.ndarray, position: int, seen: int) -> np.ndarray:
        out, size = x.copy(), self.encoding.size
        for k in range(size // 2):
            a, b = (2 * k, 2 * k + 1) if self.encoding.interleaved else (k, k + size // 2)
            wave = complex(x[a], x[b]) * cmath.exp(1j * position * self.frequency(k, seen))
            out[a], out[b] = wave.real, wave.imag
        return out

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        return x if self.encoding.keys == "raw" else self.turned(x, position, position + 1)

    def scores(self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        if self.encoding.keys == "raw":
            q = self.turned(q, query, query + 1)
            keys = np.stack([self.turned(key, p, query + 1) for key, p in zip(keys, positions, strict=True)])
        return keys @ q / math.sqrt(len(q))
