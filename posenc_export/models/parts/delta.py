"""The weights of a gated delta rule."""

from typing import Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Exact
from posenc_export.models.parts import float64


class Delta(torch.nn.Module):
    """Weights of a gated delta rule (Yang et al. 2024, Gated DeltaNet, 3.4): one linear layer for
    q, k, v, gates z, and the numbers b and a of each head; filters of q, k and v; output.

    Rates are largest_rate sigmoid(b), and logarithms of decays are -A softplus(a + t) with trained
    A and t. Outputs are rms(y) silu(z). With a rank, z and a come from short vectors, a has a
    number for each entry of a key, and outputs are rms(y) sigmoid(z) (Kimi Team 2025, KDA, 4).

    Args:
        width, heads, kv_heads, head_size: E, heads H of values, heads K of queries and keys, D.
        value_size: head size V of values; 0 for D.
        kernel: length of the filters in tokens.
        largest_rate: bound of the rates, up to 2; above 1, a state may change its sign.
        epsilon: epsilon of the norm.
        rank: size of the short vectors; 0 for none.
    """

    least = {"value_size": 0, "kernel": 2, "rank": 0}
    most = {"kernel": 1 << 10, "largest_rate": 2.0}
    above = {"largest_rate": 0, "epsilon": 0}

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        value_size: int = 0,
        kernel: int = 4,
        largest_rate: float = 1.0,
        epsilon: float = 1e-6,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.head_size, self.value_size, self.rank = head_size, value_size or head_size, rank
        self.largest_rate = float(largest_rate)
        keys, values = kv_heads * head_size, heads * self.value_size
        decays = heads * head_size if rank else heads
        self.sizes = [2 * keys + values, rank or values, heads, rank or heads]
        self.past = kernel - 1
        self.inputs = torch.nn.Linear(width, sum(self.sizes), bias=False)
        self.gates: torch.nn.Module = torch.nn.Identity()
        self.decays: torch.nn.Module = torch.nn.Identity()
        if rank:
            self.gates = torch.nn.Linear(rank, values, bias=False)
            self.decays = torch.nn.Linear(rank, decays, bias=False)
        bound = kernel**-0.5  # as torch.nn.Conv1d
        self.filters = Exact(torch.empty(self.sizes[0], 1, kernel).uniform_(-bound, bound))
        # Initial values of Qwen3-Next.
        self.decay = Exact(torch.empty(decays).uniform_(0.01, 16))
        self.step = Exact(torch.ones(decays))
        self.norm, self.epsilon = Exact(torch.ones(self.value_size)), epsilon
        self.output = torch.nn.Linear(values, width, bias=False)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B,S,E] to q, k and v before the filters [B,S,C], gates z [B,S,H*V], logarithms of
        decays [B,S,H], or [B,S,H*D] with a rank, and rates [B,S,H], float32.
        """
        mixed, z, b, a = self.inputs(x).split(self.sizes, dim=-1)
        z, a = self.gates(z), self.decays(a)
        mixed, gates, b, a = (part.to(torch.float32) for part in (mixed, z, b, a))
        decay = self.decay() * torch.nn.functional.softplus(a + self.step())
        # sigmoid(b); that of ONNX Runtime keeps 4 digits at -9, and none at -17.
        rate = torch.exp(-torch.nn.functional.softplus(-b)) * self.largest_rate
        return mixed, gates, -decay, rate

    def gated(self, y: Tensor, gates: Tensor) -> Tensor:
        """y [B,S,H,V], sqrt(D) times the output of the rule, and gates [B,S,H*V] to [B,S,H*V],
        float32.
        """
        epsilon = self.epsilon * self.head_size  # since the norm divides by that factor
        normed = torch.nn.functional.rms_norm(y, [self.value_size], self.norm(), epsilon)
        factors = torch.sigmoid(gates) if self.rank else torch.nn.functional.silu(gates)
        return normed.flatten(2) * factors

    def exact_gated(self, y: np.ndarray, gates: np.ndarray) -> np.ndarray:
        """y [n,H,V] and gates [n,H*V] to [n,H*V], float64."""
        lengths = np.sqrt((y**2).sum(-1, keepdims=True) / self.value_size + self.epsilon)
        normed = (y / lengths * float64.numbers(self.norm.value)).reshape(gates.shape)
        return normed * (1 if self.rank else gates) / (1 + np.exp(-gates))

    def exact(self, x: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """x [n,E] to the results of `forward` [n,...], float64; q, k, v after the filters."""
        ends = np.cumsum(self.sizes)[:-1]
        mixed, gates, b, a = np.split(float64.linear(self.inputs, x), ends, axis=1)
        if isinstance(self.gates, torch.nn.Linear) and isinstance(self.decays, torch.nn.Linear):
            gates, a = float64.linear(self.gates, gates), float64.linear(self.decays, a)
        filters, filtered = float64.numbers(self.filters.value)[:, 0], np.zeros_like(mixed)
        for back, weights in enumerate(filters.T[::-1]):
            filtered[back:] += mixed[: len(mixed) - back] * weights
        steps = np.logaddexp(0, a + float64.numbers(self.step.value))
        decay = -float64.numbers(self.decay.value) * steps
        rate = self.largest_rate / (1 + np.exp(-b))
        return filtered / (1 + np.exp(-filtered)), gates, decay, rate
