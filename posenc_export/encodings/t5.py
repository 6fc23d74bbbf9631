"""Relative position buckets (Raffel et al. 2020, Exploring the Limits of Transfer Learning (T5),
2.1; borders as in its published code).
"""

import math
from typing import List, Literal, Optional

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Edge, Geometry, Oracle, PositionEncoding


class T5(PositionEncoding):
    """scores + b_h[bucket(j - i)], b trained; half of the buckets are single distances, half are
    ranges that grow logarithmically up to max_distance.

    In bidirectional attention, half of all buckets are for later keys. Distances of at least
    max_distance share the last bucket of their side. Bucket borders are computed from float32
    logarithms, as for all trained checkpoints. All layers share one table.

    Hook: bias. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: heads H; causal or not.
        buckets: rows of b; even if bidirectional.
        max_distance: distance in tokens from which the last bucket is used.
        scores: "unscaled", as T5; "scaled" for q k / sqrt(D).

    Weights:
        table.weight: b, [buckets,H]; if bidirectional, the second half is for later keys.

    Raises:
        ValueError: too few buckets, max_distance not above the exact buckets, unknown scores.
    """

    most = {"buckets": 1 << 20, "max_distance": 1 << 20}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        ahead = ops.distances(q_positions, k_positions).squeeze(1)
        if self.causal:
            index = (-ahead).clamp(0, self.max_distance)
        else:
            index = ahead.clamp(-self.max_distance, self.max_distance) + self.max_distance
        rows = torch.nn.functional.embedding(self.of_distance, self.table.weight.to(torch.float32))
        return torch.nn.functional.embedding(index.to(torch.int64), rows).permute(0, 3, 1, 2)

    def edges(self) -> List[Edge]:
        one_side = self.of_distance[-self.max_distance - 1 :]
        border = int(one_side.ne(one_side[-1]).sum())
        return [Edge("last bucket", border), Edge("max distance", self.max_distance)]

    def __init__(
        self,
        geometry: Geometry,
        buckets: int = 32,
        max_distance: int = 128,
        scores: Literal["unscaled", "scaled"] = "unscaled",
    ) -> None:
        super().__init__()
        sides = 1 if geometry.causal else 2
        if buckets < 2 * sides or buckets % sides:
            raise ValueError(
                f"t5: expected buckets of at least {2 * sides} and divisible by {sides}, got "
                f"{buckets}; set buckets=N"
            )
        exact = buckets // sides // 2
        if max_distance <= exact:
            raise ValueError(
                f"t5: expected max_distance above {exact}, the number of buckets of single "
                f"distances, got {max_distance}; set max_distance=N"
            )
        self.buckets, self.max_distance = buckets, max_distance
        self.causal, self.scores = geometry.causal, scores
        self.of_distance: Tensor
        index = _buckets(np.arange(max_distance + 1), buckets // sides, max_distance)
        if not geometry.causal:
            index = np.concatenate((index[:0:-1], index[:1], index[1:] + buckets // 2))
        self.register_buffer("of_distance", torch.from_numpy(index), persistent=False)
        self.table = torch.nn.Embedding(buckets, geometry.heads)
        torch.nn.init.normal_(self.table.weight, std=geometry.width**-0.5)  # as T5

    def score_scale(self, head_size: int) -> float:
        return 1.0 if self.scores == "unscaled" else 1 / math.sqrt(head_size)


def _buckets(distances: np.ndarray, buckets: int, max_distance: int) -> np.ndarray:
    """Buckets [n] int64 of distances [n] on one side."""
    exact = buckets // 2
    # In torch: numpy's float32 logarithm may differ in the last digit.
    ratio = torch.from_numpy(np.maximum(distances, 1)).to(torch.float32) / exact
    steps = torch.log(ratio) / math.log(max_distance / exact) * (buckets - exact)
    far = np.minimum(exact + steps.to(torch.int64).numpy(), buckets - 1)
    return np.where(distances < exact, distances, far)


class T5Oracle(Oracle, of=T5):
    def bias(self, head: int, query: int, key: int) -> float:
        return float(self.weights["table.weight"][self.bucket(key - query), head])

    def score_scale(self, head_size: int) -> float:
        return 1.0 if self.encoding.scores == "unscaled" else head_size**-0.5

    def bucket(self, ahead: int) -> int:
        e = self.encoding
        count = e.buckets if e.causal else e.buckets // 2
        first = count if ahead > 0 and not e.causal else 0
        distance, exact = abs(ahead), count // 2
        if distance < exact:
            return int(first + distance)
        ratio = torch.log(torch.tensor(distance, dtype=torch.float32) / exact)
        steps = int(ratio / math.log(e.max_distance / exact) * (count - exact))
        return int(first + min(exact + steps, count - 1))
