"""Relative position buckets (Raffel et al. 2020, Exploring the Limits of Transfer Learning (T5), 2.1; borders as in its published code)."""

import math
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding

SCORES = ("unscaled", "scaled")


class T5(PositionEncoding):
    """scores + b_h[bucket(j - i)], b trained: half of the buckets for one distance each, half for distances growing logarithmically to max_distance.

    Bidirectional attention gives half of all buckets to keys ahead. Distances from max_distance on share the last bucket of their side.
    Bucket borders are those of float32 logarithms, as every checkpoint was trained with. One table serves all layers.

    Hook: bias. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: heads H; causal or not.
        buckets: rows of b; even where bidirectional.
        max_distance: tokens, from which on the last bucket is used.
        scores: "unscaled" as T5, "scaled" for q k / sqrt(D).

    Weights:
        table.weight: b, [buckets,H]; where bidirectional, buckets of keys ahead in the second half.

    Raises:
        ValueError: too few buckets, max_distance not above the exact buckets, unknown scores.
    """

    def __init__(self, geometry: Geometry, buckets: int = 32, max_distance: int = 128, scores: str = "unscaled") -> None:
        super().__init__()
        sides = 1 if geometry.causal else 2
        if buckets < 2 * sides or buckets % sides:
            raise ValueError(f"t5: buckets are at least {2 * sides} and divisible by {sides}, got {buckets}; set buckets=N")
        if max_distance <= buckets // sides // 2:
            raise ValueError(f"t5: max_distance is above the {buckets // sides // 2} exact distances, got {max_distance}; set max_distance=N")
        if scores not in SCORES:
            raise ValueError(f"t5: scores is one of {', '.join(SCORES)}, got {scores!r}")
        self.buckets, self.max_distance, self.causal, self.scores = buckets, max_distance, geometry.causal, scores
        self.of_distance: Tensor
        near = _buckets(np.arange(max_distance + 1), buckets // sides, max_distance)
        whole = near if geometry.causal else np.concatenate((near[:0:-1], near[:1], near[1:] + buckets // 2))
        self.register_buffer("of_distance", torch.from_numpy(whole), persistent=False)
        self.table = torch.nn.Embedding(buckets, geometry.heads)
        torch.nn.init.normal_(self.table.weight, std=geometry.width**-0.5)  # as T5

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        ahead = ops.distances(q_positions, k_positions).squeeze(1)
        if self.causal:
            index = (-ahead).clamp(0, self.max_distance)
        else:
            index = ahead.clamp(-self.max_distance, self.max_distance) + self.max_distance
        rows = torch.nn.functional.embedding(self.of_distance, self.table.weight.to(torch.float32))
        return torch.nn.functional.embedding(index.to(torch.int64), rows).permute(0, 3, 1, 2)

    def score_scale(self, head_size: int) -> float:
        return 1.0 if self.scores == "unscaled" else 1 / math.sqrt(head_size)

    def oracle(self) -> Oracle:
        return T5Oracle(self)


def _buckets(distances: np.ndarray, buckets: int, max_distance: int) -> np.ndarray:
    """Bucket [n] int64 of distances [n] on one side."""
    exact = buckets // 2
    ratio = torch.from_numpy(np.maximum(distances, 1)).to(torch.float32) / exact  # in torch: numpy's float32 logarithm may differ in the last digit
    steps = torch.log(ratio) / math.log(max_distance / exact) * (buckets - exact)
    far = np.minimum(exact + steps.to(torch.int64).numpy(), buckets - 1)
    return np.where(distances < exact, distances, far)


class T5Oracle(Oracle):
    def __init__(self, encoding: T5) -> None:
        self.encoding, self.table = encoding, encoding.table.weight.detach().double().numpy()

    def score_scale(self, head_size: int) -> float:
        return 1.0 if self.encoding.scores == "unscaled" else head_size**-0.5

    def bucket(self, ahead: int) -> int:
        e = self.encoding
        count, first = (e.buckets, 0) if e.causal else (e.buckets // 2, e.buckets // 2 if ahead > 0 else 0)
        distance, exact = abs(ahead), count // 2
        if distance < exact:
            return first + distance
        ratio = torch.log(torch.tensor(distance, dtype=torch.float32) / exact) / math.log(e.max_distance / exact) * (count - exact)
        return first + min(exact + int(ratio), count - 1)

    def bias(self, head: int, query: int, key: int) -> float:
        return float(self.table[self.bucket(key - query), head])
