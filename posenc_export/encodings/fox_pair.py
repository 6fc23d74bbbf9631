"""Forget gates for pairs of tokens (x-transformers' per-row data-dependent ALiBi, after Lin et
al. 2025, Forgetting Transformer, 3.1).
"""

import math
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.fox import log_sigmoid
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen, StateSpec


class FoXPair(PositionEncoding):
    """scores + scale sum of log f_il over keys l = j .. i - 1, f_il = sigmoid(a_i . b_l /
    sqrt(size)), a_i = A_h x_i, b_l = B_h x_l.

    The gates depend on the query, so that sums are computed for every query, in float64.
    Memory besides the scores: three tensors [B,H,S,T] in float64.

    State: b of every key [B,H,T,size], float32.

    Args:
        geometry: width E of x, heads H.
        size: entries of a and of b.
        scale: factor on the sums.

    Weights:
        gate.weight: A, then B, [2*H*size,E], heads outermost in each.
    """

    shared = False
    works_in = ("causal",)
    above = {"scale": 0}
    least = {"size": 1}
    most = {"size": 4096}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding; states [b, a / sqrt(size)]."""
        logs = log_sigmoid(ops.products(states[1], states[0]))
        behind = ops.distances(seen.positions, seen.key_positions).lt(0)
        behind = behind.logical_and(seen.key_positions.ge(0).unsqueeze(1).unsqueeze(2))  # [B,1,S,T]
        sums = ops.suffix_sum(torch.where(behind, logs, torch.zeros_like(logs)))
        content = (self.scale * sums).to(torch.float32)
        return ops.attend(q, seen.keys, seen.values, seen.mask, content, scale)

    def __init__(self, geometry: Geometry, size: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.size, self.scale = geometry.heads, size, float(scale)
        self.gate = torch.nn.Linear(geometry.width, 2 * geometry.heads * size, bias=False)

    def observe(
        self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: list[Tensor]
    ) -> list[Tensor]:
        """states [b [B,H,P,size]] to b [B,H,T,size], and a / sqrt(size) [B,S,H,size]."""
        both = self.gate(x).to(torch.float32)
        both = both.view(x.size(0), x.size(1), 2 * self.heads, self.size)
        a, b = both.split(self.heads, dim=2)  # [B,S,H,size] each
        b = torch.where(positions.ge(0).unsqueeze(2).unsqueeze(3), b, torch.zeros_like(b))
        return [ops.append(states[0], b, write_index), a * (1 / math.sqrt(self.size))]

    def layer_states(self) -> list[StateSpec]:
        return [StateSpec("gate", (self.heads, self.size), grows=True, dtype="float32")]


class FoXPairOracle(Oracle, of=FoXPair):
    def scores(
        self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        e = self.encoding
        of_query, of_key = self.weights["gate.weight"].reshape(2, e.heads, e.size, -1)[:, head]
        a, b = of_query @ self.x[query - self.first], self.x[: query - self.first] @ of_key.T
        logs = [-float(np.logaddexp(0, -(a @ row) / math.sqrt(len(a)))) for row in b]
        decays = [e.scale * math.fsum(logs[p - self.first :]) for p in positions]
        return keys @ q / math.sqrt(len(q)) + np.array(decays)
