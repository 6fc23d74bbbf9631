"""LongRoPE: one set of frequency factors up to the trained length, another beyond it (Ding et
al. 2024, LongRoPE, 3.3; as in Phi-3).
"""

import math
from typing import Any, Literal, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.oracles import Rows
from posenc_export.encodings.shared.rotary import (
    Layout,
    Rotation,
    RotationOracle,
    multiply_pairs,
    waves_of,
)
from posenc_export.encodings.shared.tables import wave_tables
from posenc_export.shared.refusal import refusal

Factors = str | Sequence[float]
Lengths = Literal["by_position", "long", "short"]


class RoPELongRoPE(Rotation):
    """Pair k is rotated by p w_k / f_k, w_k = theta^(-2k/r); f is short_factor for queries that
    have seen at most L tokens, else long_factor.

    Keys are rotated with the factors of the query that reads them, and cos and sin are scaled by
    attention_factor. To that end the r rotated entries of each key are cached with both sets, and
    a query has zeros for the set that it does not use. Results do not depend on how a sequence is
    cut into calls.

    lengths="long" or "short" uses the same factors at all positions and caches each key once; vLLM
    and llama.cpp do this, and choose long if the longest allowed length is above L. transformers
    uses the long factors for all tokens of a prompt longer than L.

    Cached keys have D + r entries, or D with other lengths than "by_position".

    Args:
        geometry: head size D.
        theta, layout, rotary: see RoPE.
        short_factor, long_factor: r/2 factors each, as a list or as text with ; between the
            numbers; all 1 if not given.
        original_max_positions: L, tokens the model was trained on.
        attention_factor: factor on cos and sin; if not given, sqrt(1 + ln(max_positions / L) / ln
            L), or 1 if the range is not above L.
        lengths: "by_position", "long" or "short".
    """

    least = {"original_max_positions": 2}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes as in PositionEncoding, with `key_size` in place of D."""
        if self.fixed:
            cos, sin = self.cos.rows, self.sin.rows
            return ops.rotate_both(q, k, positions, cos, sin, self.interleaved)
        near, far = self.turned(q, positions, False), self.turned(q, positions, True)
        is_far = positions.ge(self.original)[:, :, None, None]
        zero = torch.zeros([1], dtype=q.dtype, device=q.device)
        of_near = torch.where(is_far, zero, near[..., : self.size])
        of_far = torch.where(is_far, far[..., : self.size], zero)
        parts = [of_near, of_far]
        if self.size < near.size(3):
            parts = [of_near, near[..., self.size :], of_far]
        near, far = self.turned(k, positions, False), self.turned(k, positions, True)
        return torch.cat(parts, dim=-1), torch.cat((near, far[..., : self.size]), dim=-1)

    def frequency(self, k: int) -> float:
        """The frequency of the first tables."""
        return self.frequencies(self.lengths == "long")[k]

    def formulas(self) -> Mapping[str, Rows]:
        def far(positions: np.ndarray) -> np.ndarray:
            return positions * np.array(self.frequencies(True))

        return {**super().formulas(), **waves_of(far, self.magnitude, ("long_cos", "long_sin"))}

    def edges(self) -> dict[str, int]:
        return {} if self.fixed else {f"original length {self.original}": self.original}

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10000.0,
        short_factor: Factors = "",
        long_factor: Factors = "",
        original_max_positions: int = 4096,
        attention_factor: float | None = None,
        layout: Layout = "half",
        rotary: int | None = None,
        lengths: Lengths = "by_position",
    ) -> None:
        super().__init__(geometry, layout, rotary)
        self.theta, self.original = float(theta), original_max_positions
        self.lengths, self.fixed = lengths, lengths != "by_position"
        stretch = max(geometry.max_positions / original_max_positions, 1.0)
        magnitude = math.sqrt(1 + math.log(stretch) / math.log(original_max_positions))
        self.magnitude = magnitude if attention_factor is None else float(attention_factor)
        texts = {"short_factor": short_factor, "long_factor": long_factor}
        self.factors = [_factors(name, text, self.size // 2) for name, text in texts.items()]
        self.tabulate()
        # With fixed factors only the first tables are read.
        far, count = self.frequencies(True), 1 if self.fixed else self.count
        self.long_cos, self.long_sin = wave_tables(far, count, self.magnitude)

    def frequencies(self, far: bool) -> list[float]:
        """w_k / f_k with the short or the long factors."""
        return [
            1 / (factor * self.theta ** (2 * k / self.size))
            for k, factor in enumerate(self.factors[far])
        ]

    def key_size(self, head_size: int) -> int:
        return head_size if self.fixed else head_size + self.size

    def turned(self, x: Tensor, positions: Tensor, far: bool) -> Tensor:
        """Rotate x [B,S,N,D] with the long factors, or the short ones."""
        cos = self.long_cos.rows if far else self.cos.rows
        sin = self.long_sin.rows if far else self.sin.rows
        return ops.rotate_pairs(x, positions, cos, sin, self.interleaved)


def _factors(name: str, text: Factors, count: int) -> list[float]:
    parts = text.split(";") if isinstance(text, str) else list(text)
    try:
        factors = [float(part) for part in parts] if parts not in ([""], []) else [1.0] * count
    except ValueError:
        rule = f"{name} to be numbers with ; between them"
        raise refusal("rope_longrope", rule, repr(text)) from None
    if len(factors) != count or not all(0 < factor < math.inf for factor in factors):
        rule = f"{name} to be {count} finite numbers above 0, one for each pair"
        raise refusal("rope_longrope", rule, f"{len(factors)}: {text!r}")
    return factors


class RoPELongRoPEOracle(RotationOracle, of=RoPELongRoPE):
    def rotated(self, x: np.ndarray, position: int, seen: int) -> np.ndarray:
        """Rotate x [D] for a query that has seen `seen` tokens."""
        e = self.encoding
        angles = position * np.array(e.frequencies(seen > e.original))
        return multiply_pairs(x, e.magnitude * np.exp(1j * angles), e.interleaved)

    def rotate(self, x: np.ndarray, position: Any) -> np.ndarray:
        e = self.encoding
        if e.fixed:
            return super().rotate(x, position)
        whole = self.rotated(x, position, position + 1)
        own, none = whole[: e.size], np.zeros(e.size)
        first, last = (none, own) if position + 1 > e.original else (own, none)
        return np.concatenate((first, whole[e.size :], last))

    def rotate_key(self, x: np.ndarray, position: Any) -> np.ndarray:
        e = self.encoding
        if e.fixed:
            return self.rotate(x, position)
        near, far = self.rotated(x, position, 0), self.rotated(x, position, e.original + 1)
        return np.concatenate((near, far[: e.size]))

    def score_scale(self, head_size: int) -> float:
        """1 / sqrt(D), where head_size is the size of rotated keys."""
        added = 0 if self.encoding.fixed else self.encoding.size
        return 1 / math.sqrt(head_size - added)
