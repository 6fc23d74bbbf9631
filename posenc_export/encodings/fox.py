"""Forgetting attention, or data-dependent ALiBi: a forget gate per head as a bias (Lin et al.
2025, Forgetting Transformer, 3.1).
"""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen, StateSpec


class FoX(PositionEncoding):
    """scores + scale sum of log f_l over tokens l = j + 1 .. i, f_l = sigmoid(w_h . x_l + b_h).

    Bidirectional attention has a second gate per head for later keys, whose logarithms are summed
    over l = i + 1 .. j (x-transformers).

    State: log f of every key [B,H,T,1], float32; 0 at padding, which adds nothing. Every call sums
    the cached terms again, in float64, so that the difference of two long sums is exact in float32.
    A running sum in the cache would lose digits of recent terms as it grows.

    Args:
        geometry: width E of x, heads H.
        remember: initial bias b of the gates; a larger bias forgets less.
        scale: factor on the sums; 1 in the paper.

    Weights:
        gate.weight, gate.bias: w and b, [H,E] and [H]; if bidirectional [2H,E] and [2H], gates of
            earlier keys before gates of later keys.
    """

    any_size = True
    shared = False
    above = {"scale": 0}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding; states [log gates [B,H or 2H,T,1]]."""
        distances = ops.distances(seen.positions, seen.key_positions)
        between = ops.sums_between(states[0], distances)
        if not self.causal:
            is_later = distances.gt(0)
            between = torch.where(is_later, -between[:, self.heads :], between[:, : self.heads])
        return ops.attend(q, seen.keys, seen.values, seen.mask, between, scale)

    def __init__(self, geometry: Geometry, remember: float = 3.0, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.scale, self.causal = geometry.heads, float(scale), geometry.causal
        self.gate = torch.nn.Linear(geometry.width, geometry.heads * (1 if geometry.causal else 2))
        torch.nn.init.constant_(self.gate.bias, float(remember))

    def observe(
        self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: list[Tensor]
    ) -> list[Tensor]:
        """states [log gates [B,H,P,1]] to [[B,H,T,1]]; bidirectional: none to [[B,2H,S,1]]."""
        logs = log_sigmoid(self.gate(x)).to(torch.float32)
        if self.scale != 1.0:
            logs = logs * self.scale
        logs = torch.where(positions.ge(0).unsqueeze(2), logs, torch.zeros_like(logs)).unsqueeze(3)
        if self.causal:
            return [ops.append(states[0], logs, write_index)]
        return [logs.transpose(1, 2)]

    def layer_states(self) -> list[StateSpec]:
        return [StateSpec("gate", (self.heads, 1), grows=True, dtype="float32")]


def log_sigmoid(gates: Tensor) -> Tensor:
    """Logarithms of sigmoids in float64. torch's logsigmoid is exported as log(sigmoid)."""
    gates = gates.to(torch.float64)
    return gates.clamp(max=0.0) - (1 + (-gates.abs()).exp()).log()


class FoXOracle(Oracle, of=FoX):
    def observe(self, x: np.ndarray, first: int = 0) -> None:
        gates = x @ self.weights["gate.weight"].T + self.weights["gate.bias"]
        self.first, self.logs = first, -np.logaddexp(0, -gates) * self.encoding.scale

    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        gate, low, high = head, key, query
        if key > query:
            gate, low, high = self.encoding.heads + head, query, key
        return math.fsum(self.logs[low + 1 - self.first : high + 1 - self.first, gate])
