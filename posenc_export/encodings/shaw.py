"""Relative position representations (Shaw et al. 2018, Self-Attention with Relative Position
Representations, 3.2; BERT's relative keys).
"""

import math
from typing import Literal, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen


class Shaw(PositionEncoding):
    """scores (q_i . (k_j + a[c])) / sqrt(D) and values v_j + b[c], c = clip(j - i, -left, right);
    a, b shared by heads, trained.

    Products with a are computed once per query and row of a, then gathered by distance. Attention
    weights are summed by distance before they are multiplied with b. No tensor [S,T,D] is needed.
    Memory besides the scores: [B,H,S,left+right+1], and the index [B,H,S,T] int64.

    The paper counts positions from 1, which changes no distance.

    Args:
        geometry: head size D, even for sinusoids; heads.
        left, right: clipping distances in tokens, before and after the query.
        score: "query", as in the paper; "query_key" adds k_j . a[c] (BERT's relative_key_query).
        values: "relative", as in the paper; "plain" for b = 0, as Wav2Vec2-BERT (its left is 64,
            right 8).

    Weights:
        keys, values: a and b, [left+right+1,D], from c = -left on. If parameter values is "plain",
            b has no rows.
    """

    shared = False
    least = {"left": 0, "right": 0}
    most = {"left": 1 << 20, "right": 1 << 20}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding, without states."""
        clipped = ops.distances(seen.positions, seen.key_positions).clamp(-self.left, self.right)
        index = (clipped + self.left).to(torch.int64)  # [B,1,S,T]
        table = self.keys.to(torch.float32)
        rows = (scale * q.to(torch.float32)).transpose(1, 2) @ table.t()
        key_rows: Tensor | None = None
        if self.score == "query_key":
            key_rows = (seen.keys.to(torch.float32) @ table.t()).index_select(1, self.of_head)
        content = ops.pick(rows, index, key_rows, scale)
        if not self.relative_values:
            return ops.attend(q, seen.keys, seen.values, seen.mask, content, scale)
        y, weights = ops.attend_with_weights(q, seen.keys, seen.values, seen.mask, content, scale)
        by_distance = ops.collect_by_distance(
            weights, seen.positions, seen.key_positions, self.left, self.right
        )
        relative = by_distance @ self.values.to(torch.float32)
        return y + relative.transpose(1, 2).flatten(2).to(seen.values.dtype)

    def edges(self) -> dict[str, int]:
        return {f"left {self.left}": self.left + 1, f"right {self.right}": self.right + 1}

    def row_rules(self) -> list[str]:
        return [f"min(max(k - q, -{self.left}), {self.right}) + {self.left}"]

    def __init__(
        self,
        geometry: Geometry,
        left: int = 16,
        right: int = 16,
        score: Literal["query", "query_key"] = "query",
        values: Literal["relative", "plain"] = "relative",
    ) -> None:
        super().__init__()
        self.left, self.right, self.score = left, right, score
        self.relative_values, size = values == "relative", geometry.head_size
        self.of_head: Tensor
        self.register_buffer("of_head", geometry.key_head(), persistent=False)
        rows = left + right + 1
        self.keys, self.values = (
            torch.nn.Parameter(torch.randn(count, size) / math.sqrt(size))
            for count in (rows, rows if self.relative_values else 0)
        )


class ShawOracle(Oracle, of=Shaw):
    def row(self, query: int, key: int) -> int:
        e = self.encoding
        return int(min(max(key - query, -e.left), e.right) + e.left)

    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        a = self.weights["keys"][self.row(query, key)]
        return float((q + k if self.encoding.score == "query_key" else q) @ a) / math.sqrt(len(q))

    def values(
        self, head: int, values: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        if not self.encoding.relative_values:
            return values
        relative: np.ndarray = self.weights["values"][[self.row(query, p) for p in positions]]
        return values + relative
