"""Kernelized relative positional embedding (Chi et al. 2022, KERPLE, 4)."""

import math
from typing import Literal

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Exact, Geometry, Oracle, PositionEncoding


class KERPLE(PositionEncoding):
    """scores - r1_h log(1 + r2_h |i - j|), or scores - r1_h |i - j|^r2_h with r2_h in (0, 2]; r1,
    r2 above 0, trained as logarithms.

    The paper counts positions from 1, which changes no score.

    Args:
        geometry: heads H, with one r1 and one r2 each.
        kernel: "log" or "power".

    Weights:
        r.value: logarithms of r1 and of r2, [2,H,1,1].
    """

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        r, distances = self.r().exp(), ops.distances(q_positions, k_positions).abs()
        if self.kernel == "log":
            return -r[0] * torch.log1p(r[1] * distances)
        return -r[0] * distances.pow(r[1].clamp(max=2.0))

    def __init__(self, geometry: Geometry, kernel: Literal["log", "power"] = "log") -> None:
        super().__init__()
        self.kernel = kernel
        self.r = Exact(torch.rand(2, geometry.heads, 1, 1).clamp(min=0.1).log())


class KERPLEOracle(Oracle, of=KERPLE):
    def bias(self, head: int, query: int, key: int) -> float:
        first, second = map(math.exp, self.weights["r.value"][:, head, 0, 0])
        distance = abs(query - key)
        if self.encoding.kernel == "log":
            return -first * math.log1p(second * distance)
        return -first * float(distance ** min(second, 2.0))
