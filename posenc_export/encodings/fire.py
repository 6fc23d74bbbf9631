"""Functional interpolation for relative positions (Li et al. 2023, FIRE, 3.2)."""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Exact, Geometry, Oracle, PositionEncoding


class FIRE(PositionEncoding):
    """scores + f_h(psi(i - j) / (psi(max(L, i)) + 1e-6)), psi(x) = log(c x + 1), f an MLP from one
    number to H; c and L trained.

    The divisor depends on the query only, so cached keys are valid at every length. As in the
    authors' code, it adds 1e-6 and counts positions from 0; the paper does neither. Memory: the
    hidden layer [B,S,T,hidden]; prompts are read in chunks, which limit S.

    Args:
        geometry: heads H.
        hidden: width of the MLP's hidden layer.
        threshold: initial value of L in tokens.

    Weights:
        slope.value, threshold.value: c and L, [1] each; their absolute values are used.
        first.weight, first.bias: first layer of f, [hidden,1] and [hidden].
        second.weight, second.bias: second layer of f, [H,hidden] and [H].
    """

    works_in = ("causal",)
    above = {"threshold": 0}
    least = {"hidden": 1}
    most = {"hidden": 4096}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        slope, threshold = self.slope().abs(), self.threshold().abs()
        behind = (-ops.distances(q_positions, k_positions)).clamp(min=0)
        reach = torch.maximum(q_positions.to(torch.float32), threshold)
        return ops.layers_of_ratio(
            torch.log1p(slope * behind),
            torch.log1p(slope * reach) + 1e-6,
            self.first.weight.to(torch.float32),
            self.first.bias.to(torch.float32),
            self.second.weight.to(torch.float32),
            self.second.bias.to(torch.float32),
        )

    def edges(self) -> dict[str, int]:
        threshold = int(self.threshold().abs().ceil().item())
        return {f"threshold {threshold}": threshold}

    def __init__(self, geometry: Geometry, hidden: int = 32, threshold: float = 512.0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, hidden)
        self.second = torch.nn.Linear(hidden, geometry.heads)
        self.slope = Exact(torch.tensor([0.1]))
        self.threshold = Exact(torch.tensor([float(threshold)]))
        torch.nn.init.normal_(self.second.weight, std=1.0)  # so that scores differ before training


class FIREOracle(Oracle, of=FIRE):
    def bias(self, head: int, query: int, key: int) -> float:
        w = self.weights
        slope, threshold = abs(w["slope.value"][0]), abs(w["threshold.value"][0])
        reach = math.log(slope * max(threshold, query) + 1) + 1e-6
        x = math.log(slope * max(query - key, 0) + 1) / reach
        inner = np.maximum(0.0, w["first.weight"][:, 0] * x + w["first.bias"])
        return float(w["second.weight"][head] @ inner + w["second.bias"][head])
