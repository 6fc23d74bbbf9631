"""Relative position representations (Shaw et al. 2018, Self-Attention with Relative Position Representations, 3.2; BERT's relative_key and relative_key_query)."""

import math
from typing import List, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding

SCORES = ("query", "query_key")
VALUES = ("relative", "plain")


class Shaw(PositionEncoding):
    """scores (q_i . (k_j + a[c])) / sqrt(D) and values v_j + b[c], c = clip(j - i, -left, right); a, b trained, shared by heads.

    Products with a are formed once per query and row of a, and picked by distance; shares are collected by distance before they meet b: no tensor
    [S,T,D]. Memory beside the scores: [B,H,S,left+right+1], and the index [B,H,S,T] int64.

    Hook: rescore. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: head size D, heads.
        left, right: clipping distances in tokens, behind and ahead of the query.
        score: "query" as the paper, "query_key" adds k_j . a[c] (BERT's relative_key_query).
        values: "relative" as the paper, "plain" for b = 0.

    Raises:
        ValueError: negative distances, unknown score or values.
    """

    shared = False

    def __init__(self, geometry: Geometry, left: int = 16, right: int = 16, score: str = "query", values: str = "relative") -> None:
        super().__init__()
        if left < 0 or right < 0:
            raise ValueError(f"shaw: clipping distances are 0 or more, got left={left}, right={right}")
        for name, value, choices in (("score", score, SCORES), ("values", values, VALUES)):
            if value not in choices:
                raise ValueError(f"shaw: {name} is one of {', '.join(choices)}, got {value!r}")
        self.left, self.right, self.score, self.mixed = left, right, score, values
        self.of_head: Tensor
        self.register_buffer("of_head", torch.arange(geometry.heads) // (geometry.heads // (geometry.kv_heads or geometry.heads)), persistent=False)
        self.keys = torch.nn.Parameter(torch.randn(left + right + 1, geometry.head_size) / math.sqrt(geometry.head_size))
        self.values = torch.nn.Parameter(torch.randn(left + right + 1 if values == "relative" else 0, geometry.head_size) / math.sqrt(geometry.head_size))

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        """q [B,S,H,D], keys and values [B,K,T,D], mask [B,1 or H,S,T], positions [B,S], key_positions [B,T] to [B,S,H*D]."""
        index = (ops.distances(positions, key_positions).clamp(-self.left, self.right) + self.left).to(torch.int64)
        table = self.keys.to(torch.float32)
        content = ops.pick(q.to(torch.float32).transpose(1, 2) @ table.t(), index)
        if self.score == "query_key":
            of_keys = keys.to(torch.float32) @ table.t()
            content = content + ops.pick(of_keys.index_select(1, self.of_head), index.transpose(2, 3)).transpose(2, 3)
        if self.mixed == "plain":
            return ops.attend(q, keys, values, mask, scale * content, scale)
        shares = ops.shares(scale * (ops.products(q, keys) + content), mask)
        relative = ops.collect(shares, index, self.left + self.right + 1) @ self.values.to(torch.float32)
        return ops.mix(shares, values) + relative.transpose(1, 2).flatten(2).to(values.dtype)

    def oracle(self) -> Oracle:
        return ShawOracle(self)


class ShawOracle(Oracle):
    def __init__(self, encoding: Shaw) -> None:
        self.left, self.right, self.score = encoding.left, encoding.right, encoding.score
        self.keys, self.mixed = encoding.keys.detach().double().numpy(), encoding.values.detach().double().numpy()

    def row(self, query: int, key: int) -> int:
        return min(max(key - query, -self.left), self.right) + self.left

    def scores(self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        found = []
        for key, p in zip(keys, positions, strict=True):
            a = self.keys[self.row(query, p)]
            found.append(float(q @ (key + a)) + (float(key @ a) if self.score == "query_key" else 0.0))
        return np.array(found) / math.sqrt(len(q))

    def values(self, head: int, values: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        if not len(self.mixed):
            return values
        return np.stack([value + self.mixed[self.row(query, p)] for value, p in zip(values, positions, strict=True)])
