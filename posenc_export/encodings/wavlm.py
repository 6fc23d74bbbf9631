"""Relative position buckets times a gate of the query's token (Chen et al. 2022, WavLM, 3.1; Chi
et al. 2022, XLM-E, the same).
"""

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen
from posenc_export.encodings.shared.buckets import (
    bucket_edges,
    clipped,
    exact_bucket,
    of_distances,
    row_rules,
)
from posenc_export.shared.refusal import refusal


class WavLM(PositionEncoding):
    """scores + g_ih b_h[bucket(j - i)], g_ih = 2 + r (s_h u - 1), [r, u] = sigmoid(W x_ih + c); b,
    s, W, c trained, buckets of T5.

    x_ih are the E/H numbers of the attention's input at the place of head h, as in the published
    code; the paper uses the query instead, and 1 - r in place of r. In WavLM all layers share the
    table of the first layer, which is copied to every layer. Memory besides the scores:
    [B,H,S,buckets], and an index [B,S,T] int64.

    Args:
        geometry: width E, heads H that divide it; causal or not.
        buckets: rows of b, an even number if bidirectional.
        max_distance: distance in tokens from which the last bucket is used; larger than all
            distances with a bucket of their own.

    Weights:
        table.weight: b, [buckets,H]; if bidirectional, the second half is for later keys.
            rel_attn_embed of the first layer.
        gates.weight, gates.bias: W and c, [2,E/H] and [2]: the sums of the first and of the last
            four rows of gru_rel_pos_linear.
        factor: s, [H]; gru_rel_pos_const.
    """

    any_size = True
    shared = False
    most = {"buckets": 1 << 20, "max_distance": 1 << 20}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding; states [gates [B,H,S,1]]."""
        ahead = ops.distances(seen.positions, seen.key_positions)
        place = clipped(ahead, self.max_distance, self.causal).to(torch.int64)
        index = torch.nn.functional.embedding(place, self.of_distance.unsqueeze(1)).squeeze(4)
        rows = states[0] * self.table.weight.to(torch.float32).t().unsqueeze(1)  # [B,H,S,buckets]
        return ops.attend(q, seen.keys, seen.values, seen.mask, ops.pick(rows, index), scale)

    def observe(
        self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: list[Tensor]
    ) -> list[Tensor]:
        """x [B,S,E] to gates [B,H,S,1] float32, for `rescore` of this call."""
        of_heads = x.view(x.size(0), x.size(1), self.heads, self.size)
        gates = torch.sigmoid(self.gates(of_heads).to(torch.float32)).transpose(1, 2)  # [B,H,S,2]
        of_sum, of_factor = gates.split(1, dim=-1)
        factor = self.factor.to(torch.float32).view(1, -1, 1, 1)
        return [2.0 + of_sum * (of_factor * factor - 1.0)]

    def edges(self) -> dict[str, int]:
        return bucket_edges(self.of_distance, self.max_distance)

    def row_rules(self) -> list[str]:
        return row_rules(self.of_distance, self.max_distance, self.causal)

    def __init__(self, geometry: Geometry, buckets: int = 320, max_distance: int = 800) -> None:
        super().__init__()
        if geometry.width % geometry.heads:
            rule = f"heads that divide the width {geometry.width}"
            raise refusal("wavlm", rule, geometry.heads, "choose another width")
        self.heads, self.size = geometry.heads, geometry.width // geometry.heads
        self.buckets, self.max_distance, self.causal = buckets, max_distance, geometry.causal
        self.of_distance: Tensor
        index = of_distances("wavlm", buckets, max_distance, geometry.causal)
        self.register_buffer("of_distance", index, persistent=False)
        # Initialised from N(0, 1), so that scores differ before training.
        self.table = torch.nn.Embedding(buckets, geometry.heads)
        self.gates = torch.nn.Linear(self.size, 2)
        self.factor = torch.nn.Parameter(torch.ones(geometry.heads))


class WavLMOracle(Oracle, of=WavLM):
    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        e = self.encoding
        part = self.x[query - self.first][head * e.size : (head + 1) * e.size]
        inputs = self.weights["gates.weight"] @ part + self.weights["gates.bias"]
        of_sum, of_factor = 1 / (1 + np.exp(-inputs))
        gate = 2 + of_sum * (of_factor * self.weights["factor"][head] - 1)
        bucket = exact_bucket(key - query, e.buckets, e.max_distance, e.causal)
        return float(gate * self.weights["table.weight"][bucket, head])
