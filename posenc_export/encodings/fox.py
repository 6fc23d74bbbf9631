"""Forgetting attention: a forget gate per head as a bias (Lin et al. 2025, Forgetting Transformer, 3.1)."""

import math
from typing import List, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Carried, Geometry, Oracle, PositionEncoding


class FoX(PositionEncoding):
    """scores + sum of log f_l over tokens l = j + 1 .. i, f_l = sigmoid(w_h . x_l + b_h).

    State: log f of every key [B,H,T,1], float32; 0, which adds nothing, at padding. The kept terms are summed anew by every call, in float64: what two
    long sums differ by then keeps the digits of float32. A running sum in the cache would lose those of its recent terms as it grows.

    Hook: observe, rescore. Range: 0 .. max_positions - 1. Causal attention only.

    Args:
        geometry: width E of x, heads H.
        remember: starting bias b of the gates; larger forgets less.
    """

    shared = False
    works_in = ("causal",)

    def __init__(self, geometry: Geometry, remember: float = 3.0) -> None:
        super().__init__()
        self.heads = geometry.heads
        self.gate = torch.nn.Linear(geometry.width, geometry.heads)
        torch.nn.init.constant_(self.gate.bias, float(remember))

    def observe(self, x: Tensor, positions: Tensor, write_index: Tensor, states: List[Tensor]) -> List[Tensor]:
        """x [B,S,E], positions [B,S], write_index [B], states [log gates [B,H,P,1]] to the same with T."""
        gates = self.gate(x).to(torch.float64)
        # Not torch's logsigmoid: its export takes the logarithm of a sigmoid that has become 0. In float64 1 + exp(-|x|) is exact enough for any sum.
        logs = (gates.clamp(max=0.0) - (1 + (-gates.abs()).exp()).log()).to(torch.float32)
        logs = torch.where(positions.ge(0).unsqueeze(2), logs, torch.zeros_like(logs))
        return [ops.append(states[0], logs.unsqueeze(3), write_index)]

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        """q [B,S,H,D], keys and values [B,K,T,D], mask [B,1 or H,S,T], positions [B,S], key_positions [B,T], states [log gates [B,H,T,1]] to [B,S,H*D]."""
        logs = states[0].to(torch.float64).squeeze(3)
        beyond_key = ops.suffix_sum(logs.unsqueeze(2), False)
        after = ops.distances(positions, key_positions).gt(0).to(torch.float64).squeeze(1)
        beyond_query = logs @ after.transpose(1, 2)
        return ops.attend(q, keys, values, mask, (beyond_key - beyond_query.unsqueeze(3)).to(torch.float32), scale)

    def layer_states(self) -> List[Carried]:
        return [Carried("gate", (self.heads, 1), grows=True, dtype="float32")]

    def oracle(self) -> Oracle:
        return FoXOracle(self.gate.weight.detach().double().numpy(), self.gate.bias.detach().double().numpy())


class FoXOracle(Oracle):
    def __init__(self, weight: np.ndarray, bias: np.ndarray) -> None:
        self.weight, self.offset = weight, bias
        self.logs = np.zeros((0, len(bias)))

    def observe(self, x: np.ndarray) -> None:
        self.logs = -np.logaddexp(0, -(x @ self.weight.T + self.offset))

    def scores(self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        first = query - len(keys) + 1
        decays = [math.fsum(self.logs[p - first + 1 : query - first + 1, head]) for p in positions]
        return np.array([float(q @ key) / math.sqrt(len(q)) + decay for key, decay in zip(keys, decays, strict=True)])
