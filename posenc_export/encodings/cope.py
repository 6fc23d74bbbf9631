"""Contextual position encoding: positions counted by gates (Golovneva et al. 2024, CoPE, 4)."""

import math
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen


class CoPE(PositionEncoding):
    """scores + q_i . e[p_ij], p_ij = sum of sigmoid(q_i . k_l / sqrt(D)) over keys l = j .. i, at
    most positions - 1, e interpolated between its rows.

    There is no state, because gates depend on the query. Memory besides the scores: products with e
    [B,H,S,positions], two gathered tensors [B,H,S,T].

    Args:
        geometry: head size D.
        positions: rows of e; the largest p_ij is positions - 1.

    Weights:
        table: e, [D,positions].
    """

    shared = False
    works_in = ("causal",)
    least = {"positions": 2}
    most = {"positions": 1 << 16}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """q [B,S,H,D], keys and values [B,K,T,D], mask [B,1 or H,S,T] to [B,S,H*D]."""
        rows = q.to(torch.float32).transpose(1, 2) @ self.table.to(torch.float32)
        content = ops.rows_at_counts(q, seen.keys, seen.mask, rows, scale)
        return ops.attend(q, seen.keys, seen.values, seen.mask, content, scale)

    def edges(self) -> dict[str, int]:
        return {f"{self.table.size(1)} counts": self.table.size(1)}

    def __init__(self, geometry: Geometry, positions: int = 64) -> None:
        super().__init__()
        size = geometry.head_size
        self.table = torch.nn.Parameter(torch.randn(size, positions) / math.sqrt(size))


class CoPEOracle(Oracle, of=CoPE):
    def scores(
        self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        plain, table = [float(q @ key) / math.sqrt(len(q)) for key in keys], self.weights["table"]
        scores, counted, last = plain.copy(), 0.0, table.shape[1] - 1
        for j in reversed(range(len(keys))):
            counted += 1 / (1 + math.exp(-plain[j]))
            place = min(counted, float(last))
            below, part = int(place), place - int(place)
            above = min(below + 1, last)
            scores[j] += float(q @ ((1 - part) * table[:, below] + part * table[:, above]))
        return np.array(scores)
