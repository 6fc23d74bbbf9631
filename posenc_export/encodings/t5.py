"""Relative position buckets (Raffel et al. 2020, Exploring the Limits of Transfer Learning (T5),
2.1; borders as in its published code).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.buckets import (
    bucket_edges,
    clipped,
    exact_bucket,
    of_distances,
    row_rules,
)


class T5(PositionEncoding):
    """scores + b_h[bucket(j - i)], b trained; half of the buckets are single distances, half are
    ranges that grow logarithmically up to max_distance.

    In bidirectional attention, half of all buckets are for later keys. Distances of at least
    max_distance share the last bucket of their side. Bucket borders are computed from float32
    logarithms, as for all trained checkpoints. All layers share one table.

    Args:
        geometry: heads H; causal or not.
        buckets: rows of b, an even number if bidirectional.
        max_distance: distance in tokens from which the last bucket is used; larger than all
            distances with a bucket of their own.
        scores: "unscaled", as T5; "scaled" for q k / sqrt(D).

    Weights:
        table.weight: b, [buckets,H]; if bidirectional, the second half is for later keys.
    """

    most = {"buckets": 1 << 20, "max_distance": 1 << 20}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        ahead = ops.distances(q_positions, k_positions).squeeze(1)
        index = clipped(ahead, self.max_distance, self.causal)
        rows = torch.nn.functional.embedding(self.of_distance, self.table.weight.to(torch.float32))
        return torch.nn.functional.embedding(index.to(torch.int64), rows).permute(0, 3, 1, 2)

    def edges(self) -> dict[str, int]:
        return bucket_edges(self.of_distance, self.max_distance)

    def row_rules(self) -> list[str]:
        return row_rules(self.of_distance, self.max_distance, self.causal)

    def __init__(
        self,
        geometry: Geometry,
        buckets: int = 32,
        max_distance: int = 128,
        scores: Literal["unscaled", "scaled"] = "unscaled",
    ) -> None:
        super().__init__()
        self.buckets, self.max_distance = buckets, max_distance
        self.causal, self.scores = geometry.causal, scores
        self.of_distance: Tensor
        index = of_distances("t5", buckets, max_distance, geometry.causal)
        self.register_buffer("of_distance", index, persistent=False)
        self.table = torch.nn.Embedding(buckets, geometry.heads)
        torch.nn.init.normal_(self.table.weight, std=geometry.width**-0.5)  # as T5

    def score_scale(self, head_size: int) -> float:
        return 1.0 if self.scores == "unscaled" else 1 / math.sqrt(head_size)


class T5Oracle(Oracle, of=T5):
    def bias(self, head: int, query: int, key: int) -> float:
        e = self.encoding
        bucket = exact_bucket(key - query, e.buckets, e.max_distance, e.causal)
        return float(self.weights["table.weight"][bucket, head])

    def score_scale(self, head_size: int) -> float:
        return 1.0 if self.encoding.scores == "unscaled" else head_size**-0.5
