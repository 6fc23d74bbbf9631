"""Relative position representations (Shaw et al. 2018, Self-Attention with Relative Position Representations, 3.2; BERT's relative keys; NEZHA)."""

import math
from typing import List, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table

SCORES = ("query", "query_key")
VALUES = ("relative", "plain")
TABLES = ("trained", "sinusoidal")


class Shaw(PositionEncoding):
    """scores (q_i . (k_j + a[c])) / sqrt(D) and values v_j + b[c], c = clip(j - i, -left, right); a, b shared by heads, trained or sinusoids.

    Sinusoids are those of NEZHA (Wei et al. 2019, Functional Relative Positional Encoding):
    a[c] = b[c] = [sin(n w_k), cos(n w_k)], interleaved, n = c + left, w_k = 10000^(-2k/D).

    Products with a are computed once per query and row of a, then gathered by distance. Attention weights are summed by distance before they are multiplied
    with b. No tensor [S,T,D] is needed. Memory besides the scores: [B,H,S,left+right+1], and the index [B,H,S,T] int64.

    Hook: rescore. State: none. Range: 0 .. max_positions - 1. The paper counts positions from 1, which changes no distance.

    Args:
        geometry: head size D, heads.
        left, right: clipping distances in tokens, before and after the query.
        score: "query", as in the paper; "query_key" adds k_j . a[c] (BERT's relative_key_query).
        values: "relative", as in the paper; "plain" for b = 0.
        table: "trained", as in the paper; "sinusoidal", as NEZHA.

    Weights:
        keys, values: a and b, [left+right+1,D], from c = -left on; absent if table is "sinusoidal"; values has no rows if values is "plain".

    Raises:
        ValueError: negative distances, unknown score, values or table, sinusoids with an odd head size.
    """

    shared = False
    keys: Optional[Tensor]
    values: Optional[Tensor]
    most = {"left": 1 << 20, "right": 1 << 20}

    def __init__(
        self, geometry: Geometry, left: int = 16, right: int = 16, score: str = "query", values: str = "relative", table: str = "trained"
    ) -> None:
        super().__init__()
        if left < 0 or right < 0:
            raise ValueError(f"shaw: expected clipping distances of 0 or more, got left={left}, right={right}")
        for name, value, choices in (("score", score, SCORES), ("values", values, VALUES), ("table", table, TABLES)):
            if value not in choices:
                raise ValueError(f"shaw: expected {name} to be one of {', '.join(choices)}, got {value!r}")
        if table == "sinusoidal" and geometry.head_size % 2:
            raise ValueError(f"shaw: expected an even head size for a sinusoidal table, got {geometry.head_size}; choose another head size")
        self.left, self.right, self.score, self.mixed, size = left, right, score, values, geometry.head_size
        rows, fixed = left + right + 1, table == "sinusoidal"
        self.waves = Table(_waves(rows if fixed else 1, size))  # a trained table leaves one unused row, because torch.export writes no empty table
        self.of_head: Tensor
        self.register_buffer("of_head", torch.arange(geometry.heads) // (geometry.heads // (geometry.kv_heads or geometry.heads)), persistent=False)
        for name, count in (("keys", rows), ("values", rows if values == "relative" else 0)):
            self.register_parameter(name, None if fixed else torch.nn.Parameter(torch.randn(count, size) / math.sqrt(size)))

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        """q [B,S,H,D], keys and values [B,K,T,D], mask [B,1 or H,S,T], positions [B,S], key_positions [B,T] to [B,S,H*D]."""
        index = (ops.distances(positions, key_positions).clamp(-self.left, self.right) + self.left).to(torch.int64)
        trained, mixed = self.keys, self.values
        table = self.waves.rows if trained is None else trained.to(torch.float32)
        content = ops.pick((scale * q.to(torch.float32)).transpose(1, 2) @ table.t(), index)
        if self.score == "query_key":
            of_keys = keys.to(torch.float32) @ table.t()
            content = content + scale * ops.pick(of_keys.index_select(1, self.of_head), index.transpose(2, 3)).transpose(2, 3)
        if self.mixed == "plain":
            return ops.attend(q, keys, values, mask, content, scale)
        y, shares = ops.attend_with_weights(q, keys, values, mask, content, scale)
        relative = ops.collect_by_distance(shares, positions, key_positions, self.left, self.right) @ (table if mixed is None else mixed.to(torch.float32))
        return y + relative.transpose(1, 2).flatten(2).to(values.dtype)

    def oracle(self) -> Oracle:
        return ShawOracle(self)


def _waves(rows: int, size: int) -> np.ndarray:
    """Sinusoids [rows,D], interleaved."""
    angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    return np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(rows, -1)


class ShawOracle(Oracle):
    def __init__(self, encoding: Shaw) -> None:
        self.left, self.right, self.score = encoding.left, encoding.right, encoding.score
        if encoding.keys is None or encoding.values is None:
            size = encoding.waves.exact.shape[1]
            turns = [[n / math.pow(10000.0, (k - k % 2) / size) for k in range(size)] for n in range(self.left + self.right + 1)]
            self.keys = np.array([[math.cos(turn) if k % 2 else math.sin(turn) for k, turn in enumerate(row)] for row in turns])
            self.mixed = self.keys if encoding.mixed == "relative" else self.keys[:0]
        else:
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
