"""Dynamic NTK scaling of RoPE: the base grows with the length seen (emozilla 2023, in transformers as rope_type "dynamic")."""

import cmath
import math
from typing import List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table
from posenc_export.encodings.rotary import LAYOUTS, check_choice, dtype_of, rotary_size

KEYS, LENGTHS = ("raw", "rotated"), ("seen", "per_call")


class RoPEDynamic(PositionEncoding):
    """A query that has seen n = i + 1 tokens turns by w_k(n) = theta_n^(-2k/r), and so do all keys it looks at;
    theta_n = theta (factor n / L - factor + 1)^(r/(r-2)) where n is above L, theta up to there.

    Keys are cached raw and turned when read, by the query's own frequencies: one token at a time, in chunks and at once are the same.
    Memory beside the scores: the keys turned for each query, [B,S,K,T,D] numbers in a call, hence the small chunk. With keys="rotated" they are cached as
    turned by the length at which they came, which is what transformers does when it decodes: scores across the switch then mix frequencies.

    With lengths="per_call" all tokens of a row turn by the length of the row, n - 1 being its largest position in the call. What a token gets then depends on
    how a sequence is cut into calls, so no cache can go with it: bidirectional attention only, where a call is a whole sequence.

    Hook: rescore (rotate for rotated keys and lengths of the call). State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: head size D, heads.
        theta: base up to the original length.
        factor: by how much the base may stretch the range.
        original_max_positions: L, tokens the model was trained on.
        layout, rotary: as RoPE.
        keys: "raw" or "rotated".
        numerics: as RoPE. In float32 a score with rotated keys is that of transformers decoding one token at a time, and a score with raw keys that of the
            last query when transformers reads all n tokens at once.
        lengths: "seen", or "per_call" as transformers, which takes the longest row of a batch: the same for a row alone and for rows of one length.

    Raises:
        ValueError: odd or too large rotary size (or 2, where the exponent has no value), unknown layout, keys, numerics or lengths, factor below 1, L below 1,
            rotated keys with lengths of the call.
    """

    chunk = 8
    __jit_ignored_attributes__ = ["works_in"]  # TorchScript has no type for it

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10000.0,
        factor: float = 2.0,
        original_max_positions: int = 2048,
        layout: str = "half",
        rotary: Optional[int] = None,
        keys: str = "raw",
        numerics: str = "exact",
        lengths: str = "seen",
    ) -> None:
        super().__init__()
        size, dtype = rotary_size("rope_dynamic", geometry, rotary, least=4), dtype_of("rope_dynamic", numerics)
        check_choice("rope_dynamic", "layout", layout, LAYOUTS)
        check_choice("rope_dynamic", "keys", keys, KEYS)
        check_lengths("rope_dynamic", lengths, keys)
        if not factor >= 1 or not theta > 0 or original_max_positions < 1:
            raise ValueError(
                f"rope_dynamic: factor is at least 1, theta above 0, original_max_positions at least 1, got {factor}, {theta}, {original_max_positions}"
            )
        self.theta, self.factor, self.original = float(theta), float(factor), original_max_positions
        self.interleaved, self.size, self.keys, self.lengths = layout == "interleaved", size, keys, lengths
        if lengths == "per_call":
            self.works_in = ("bidirectional",)
        self.single = dtype == torch.float32
        frequencies = self.frequencies(geometry.max_positions, dtype)
        self.of_length = frequencies.numpy() if self.single else None  # what the oracle starts from: these roundings are not computed twice
        if keys == "rotated":
            angles = torch.arange(geometry.max_positions, dtype=dtype)[:, None] * frequencies
            self.first, self.second = Table(angles.cos().numpy()), Table(angles.sin().numpy())
        else:  # two float32 parts: their product with a distance is exact in float64
            leading = frequencies.to(torch.float32)
            self.first, self.second = Table(leading.numpy()), Table((frequencies - leading).numpy())

    def frequencies(self, count: int, dtype: torch.dtype) -> Tensor:
        """w_k(n) [count,r/2] for n = 1 .. count; in float32 with every rounding of transformers, which takes powers of lengths one by one."""
        shares, exponent = torch.arange(0, self.size, 2, dtype=dtype) / self.size, self.size / (self.size - 2)
        seen = torch.arange(self.original + 1, max(count, self.original) + 1).to(dtype)
        grown = self.factor * seen / self.original - (self.factor - 1)
        bases = self.theta * (grown.to(torch.float64) ** exponent).to(dtype)  # torch rounds a power of one number once, unlike those of many
        kept = (1.0 / self.theta**shares).expand(min(count, self.original), -1)
        return torch.cat((kept, 1.0 / bases[:, None] ** shares))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same; raw keys and their queries stay as they are."""
        if self.lengths == "per_call":
            longest = positions.amax(dim=1, keepdim=True)
            cos, sin = self.waves(positions, longest)
            return ops.turn_pairs(q, cos, sin, self.interleaved), ops.turn_pairs(k, cos, sin, self.interleaved)
        if self.keys == "raw":
            return q, k
        cos, sin = self.first.rows, self.second.rows
        return ops.rotate_both(q, k, positions, cos, sin, self.interleaved, False)

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        """q [B,S,H,D], keys and values [B,K,T,D] to [B,S,H*D]; raw keys turned by their distance to each query."""
        if self.keys == "rotated" or self.lengths == "per_call":
            return ops.attend(q, keys, values, mask, None, scale)
        angles = ops.reduced_angle(self.angles(positions, key_positions))
        scores = ops.turned_products(q, keys, angles, self.interleaved)
        return ops.mix(ops.shares(scale * scores, mask), values)

    def angles(self, positions: Tensor, key_positions: Tensor) -> Tensor:
        """positions [B,S], key_positions [B,T] int64 to the angle of each key less that of the query [B,1,S,T,r/2] float64, by the query's frequencies."""
        first = self.first(positions).unsqueeze(1).unsqueeze(3)
        if self.single:  # rounded before they meet, they depend on more than their distance
            of_query, of_key = positions.to(torch.float32)[:, None, :, None, None] * first, key_positions.to(torch.float32)[:, None, None, :, None] * first
            return of_key.to(torch.float64) - of_query.to(torch.float64)
        frequencies = first.to(torch.float64) + self.second(positions).to(torch.float64).unsqueeze(1).unsqueeze(3)
        return ops.distances(positions, key_positions).to(torch.float64).unsqueeze(4) * frequencies

    def waves(self, positions: Tensor, longest: Tensor) -> Tuple[Tensor, Tensor]:
        """cos and sin [B,S,1,r/2] float32 of positions [B,S] by the frequencies of rows whose largest positions are longest [B,1] int64."""
        places, first = positions.clamp(min=0).unsqueeze(2), self.first(longest)
        if self.single:
            angles = (places.to(torch.float32) * first).to(torch.float64)
        else:
            angles = places.to(torch.float64) * (first.to(torch.float64) + self.second(longest).to(torch.float64))
        reduced = ops.reduced_angle(angles).unsqueeze(2)
        return reduced.cos(), reduced.sin()

    def oracle(self) -> Oracle:
        return RoPEDynamicOracle(self)


def check_lengths(name: str, lengths: str, keys: str) -> None:
    """Raises: ValueError: unknown lengths, rotated keys with lengths of the call."""
    check_choice(name, "lengths", lengths, LENGTHS)
    if lengths == "per_call" and keys == "rotated":
        raise ValueError(f"{name}: keys is raw with lengths=per_call, where nothing is cached, got rotated; leave it out")


class RoPEDynamicOracle(Oracle):
    def __init__(self, encoding: RoPEDynamic) -> None:
        self.encoding, self.longest = encoding, 0

    def begin(self, positions: Sequence[int]) -> None:
        self.longest = max(positions)

    def frequency(self, k: int, seen: int) -> float:
        if self.encoding.of_length is not None:
            return float(self.encoding.of_length[seen - 1, k])
        e, base = self.encoding, self.encoding.theta
        if seen > e.original:
            base *= math.pow(e.factor * seen / e.original - e.factor + 1, e.size / (e.size - 2))
        return math.pow(base, -2 * k / e.size)

    def turned(self, x: np.ndarray, position: int, seen: int) -> np.ndarray:
        out, size = x.copy(), self.encoding.size
        for k in range(size // 2):
            a, b = (2 * k, 2 * k + 1) if self.encoding.interleaved else (k, k + size // 2)
            frequency = self.frequency(k, seen)
            angle = float(np.float32(position) * np.float32(frequency)) if self.encoding.single else position * frequency
            wave = complex(x[a], x[b]) * cmath.exp(1j * angle)
            out[a], out[b] = wave.real, wave.imag
        return out

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        if self.encoding.lengths == "per_call":
            return self.turned(x, position, self.longest + 1)
        return x if self.encoding.keys == "raw" else self.turned(x, position, position + 1)

    def scores(self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        if self.encoding.keys == "raw" and self.encoding.lengths == "seen":
            q = self.turned(q, query, query + 1)
            keys = np.stack([self.turned(key, p, query + 1) for key, p in zip(keys, positions, strict=True)])
        return keys @ q / math.sqrt(len(q))
