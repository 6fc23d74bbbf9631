"""Dynamic NTK scaling of RoPE: the base grows with the length seen (emozilla 2023, in
transformers as rope_type "dynamic").
"""

import math
from typing import List, Literal, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import (
    Edge,
    Geometry,
    Oracle,
    PositionEncoding,
    Rows,
    Table,
)
from posenc_export.encodings.shared.rotary import (
    Layout,
    Numerics,
    angles_of,
    dtype_of,
    multiply_pairs,
    rotary_size,
)
from posenc_export.encodings.shared.tables import wave_tables
from posenc_export.ops import by_query
from posenc_export.shared.refusal import refusal

Keys = Literal["raw", "rotated"]
Lengths = Literal["by_position", "per_call"]


class RoPEDynamic(PositionEncoding):
    """A query that has seen n = i + 1 tokens, and all keys it attends to, are rotated with w_k(n) =
    theta_n^(-2k/r); theta_n = theta (factor n / L - factor + 1)^(r/(r-2)) if n > L, else theta.

    Keys are cached rotated with w_k(L), and a query beyond L rotates them further. Results do not
    depend on how a sequence is cut into calls. Memory besides the scores: the keys rotated for each
    query, [B,S,K,T,D], so prompts are read in small chunks.

    With keys="rotated", keys stay as they were rotated when they arrived, as in transformers at
    decode: scores between queries beyond L and keys before L then mix frequencies. With
    lengths="per_call", all tokens of a row are rotated for the row's largest position in the call +
    1. Results then depend on the call, so only bidirectional attention, whose calls are whole
    sequences, can use it.

    Hook: rotate, rescore (only rotate with keys="rotated" or lengths="per_call"). State: none.
    Range: 0 .. max_positions - 1.

    Args:
        geometry: head size D, heads.
        theta: base up to the original length.
        factor: factor by which the range may be extended.
        original_max_positions: L, tokens the model was trained on.
        layout, rotary: see RoPE.
        keys: "raw" or "rotated".
        numerics: see RoPE. In float32, rotated keys give the scores of transformers decoding one
            token at a time; raw keys give the scores of its last query when it reads all n tokens
            in one call.
        lengths: "by_position" or "per_call". transformers takes the longest row of a batch; results
            are equal if all rows have the same length.

    Raises:
        ValueError: odd or too large rotary size (or 2, where the exponent is undefined), unknown
            layout, keys, numerics or lengths, factor below 1, L below 1, keys="rotated" with
            lengths="per_call".
    """

    chunk = 8
    __jit_ignored_attributes__ = ["works_in"]  # TorchScript does not support its type
    above = {"theta": 0}
    least = {"factor": 1, "original_max_positions": 1}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """Rotate with the frequencies up to L if keys="raw"; shapes as in PositionEncoding."""
        if self.lengths == "per_call":
            longest = positions.amax(dim=1, keepdim=True)
            cos, sin = self.waves(positions, longest)
            turned_q = ops.apply_rotation(q, cos, sin, self.interleaved)
            return turned_q, ops.apply_rotation(k, cos, sin, self.interleaved)
        linear = self.keys == "raw" and not self.single
        cos, sin = self.cos.rows, self.sin.rows
        return ops.rotate_both(q, k, positions, cos, sin, self.interleaved, linear)

    def rescore(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        positions: Tensor,
        key_positions: Tensor,
        scale: float,
        states: List[Tensor],
    ) -> Tensor:
        """As in PositionEncoding; raw keys are turned further for queries beyond L."""
        if self.keys == "rotated" or self.lengths == "per_call":
            return ops.attend(q, keys, values, mask, None, scale)
        second = None if self.single else self.second.rows
        return by_query.attend_turned_keys(
            q,
            keys,
            values,
            mask,
            positions,
            key_positions,
            self.first.rows,
            second,
            self.interleaved,
            self.original,
            scale,
        )

    def edges(self) -> List[Edge]:
        return [Edge(f"original length {self.original}", self.original, "position")]

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10000.0,
        factor: float = 2.0,
        original_max_positions: int = 2048,
        layout: Layout = "half",
        rotary: Optional[int] = None,
        keys: Keys = "raw",
        numerics: Numerics = "exact",
        lengths: Lengths = "by_position",
    ) -> None:
        super().__init__()
        size, dtype = rotary_size("rope_dynamic", geometry, rotary, least=4), dtype_of(numerics)
        check_lengths("rope_dynamic", lengths, keys)
        self.theta, self.factor, self.original = float(theta), float(factor), original_max_positions
        self.interleaved, self.size = layout == "interleaved", size
        self.keys, self.lengths = keys, lengths
        if lengths == "per_call":
            self.works_in = ("bidirectional",)
        self.single = dtype == torch.float32
        frequencies = self.frequencies(geometry.max_positions, dtype)
        # For the oracle, which does not repeat the roundings of float32.
        self.rounded = frequencies.numpy() if self.single else None
        count = geometry.max_positions if lengths == "by_position" else 1
        if keys == "rotated":
            angles = torch.arange(count, dtype=dtype)[:, None] * frequencies
            self.cos, self.sin = Table(angles.cos().numpy()), Table(angles.sin().numpy())
        else:
            self.cos, self.sin = wave_tables(frequencies[0], count)
        # Keys that are cached rotated are not rotated further.
        read = frequencies if keys == "raw" else frequencies[:1]
        leading = read.to(torch.float32)
        # Two float32 parts have together 48 significant bits.
        self.first, self.second = Table(leading.numpy()), Table((read - leading).numpy())

    def frequencies(self, count: int, dtype: torch.dtype) -> Tensor:
        """w_k(n) [count,r/2], n = 1 .. count; float32 rounds as transformers does."""
        shares = torch.arange(0, self.size, 2, dtype=dtype) / self.size
        exponent = self.size / (self.size - 2)
        seen = torch.arange(self.original + 1, max(count, self.original) + 1).to(dtype)
        grown = self.factor * seen / self.original - (self.factor - 1)
        # torch rounds the power of a single number only once.
        bases = self.theta * (grown.to(torch.float64) ** exponent).to(dtype)
        kept = (1.0 / self.theta**shares).expand(min(count, self.original), -1)
        return torch.cat((kept, 1.0 / bases[:, None] ** shares))

    def waves(self, positions: Tensor, longest: Tensor) -> Tuple[Tensor, Tensor]:
        """cos, sin [B,S,1,r/2] at positions [B,S], for largest positions longest [B,1]."""
        places, first = positions.clamp(min=0).unsqueeze(2), self.first(longest)
        if self.single:
            angles = (places.to(torch.float32) * first).to(torch.float64)
        else:
            wide, leading = places.to(torch.float64), first.to(torch.float64)
            angles = wide * (leading + self.second(longest).to(torch.float64))
        reduced = ops.reduced_angle(angles).unsqueeze(2)
        return reduced.cos(), reduced.sin()


def check_lengths(name: str, lengths: str, keys: Keys) -> None:
    """Raise ValueError for keys="rotated" with other lengths than "by_position"."""
    if lengths != "by_position" and keys == "rotated":
        raise refusal(name, f"keys=raw with lengths={lengths}", "keys=rotated", "leave it out")


class RoPEDynamicOracle(Oracle, of=RoPEDynamic):
    def frequency(self, k: int, seen: int) -> float:
        if self.encoding.rounded is not None:
            return float(self.encoding.rounded[seen - 1, k])
        e, base = self.encoding, self.encoding.theta
        if seen > e.original:
            base *= math.pow(e.factor * seen / e.original - e.factor + 1, e.size / (e.size - 2))
        return math.pow(base, -2 * k / e.size)

    def tables(self) -> Mapping[str, Rows]:
        e = self.encoding
        shares = np.array([2 * k / e.size for k in range(e.size // 2)])
        self.table_ulps = 1.0 if e.single else 0.5

        def frequencies(positions: np.ndarray) -> np.ndarray:
            if e.rounded is not None:
                rounded: np.ndarray = e.rounded[positions[:, 0].astype(int)]
                return rounded
            grown = np.maximum(e.factor * (positions + 1) / e.original - e.factor + 1, 1.0)
            bases = e.theta * grown ** (e.size / (e.size - 2))
            bases = np.where(positions + 1 > e.original, bases, e.theta)
            return bases**-shares

        def angles(positions: np.ndarray) -> np.ndarray:
            steps = frequencies(positions if e.keys == "rotated" else np.zeros_like(positions))
            return (positions.astype(steps.dtype) * steps).astype(np.float64)

        return {
            "cos": lambda positions: np.cos(angles(positions)),
            "sin": lambda positions: np.sin(angles(positions)),
            "first": frequencies,
        }

    def angles(self, position: int, seen: int) -> np.ndarray:
        e = self.encoding
        frequencies = [self.frequency(k, seen) for k in range(e.size // 2)]
        return angles_of(position, frequencies, e.single)

    def rotated(self, x: np.ndarray, position: int, seen: int, rotated_for: int = 0) -> np.ndarray:
        """Rotate x [D] for a length; by the difference, if already rotated."""
        angles = self.angles(position, seen)
        if rotated_for:
            angles = angles - self.angles(position, rotated_for)
        return multiply_pairs(x, np.exp(1j * angles), self.encoding.interleaved)

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        if self.encoding.lengths == "per_call":
            return self.rotated(x, position, self.longest + 1)
        return self.rotated(x, position, 1 if self.encoding.keys == "raw" else position + 1)

    def scores(
        self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        if self.encoding.keys == "raw" and self.encoding.lengths == "by_position":
            q = self.rotated(q, query, query + 1, rotated_for=1)
            pairs = zip(keys, positions, strict=True)
            keys = np.stack([self.rotated(key, p, query + 1, rotated_for=1) for key, p in pairs])
        return keys @ q / math.sqrt(len(q))
