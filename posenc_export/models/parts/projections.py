"""Projections of hidden states to queries, keys and values, and of outputs to hidden states."""

from typing import Any, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Exact
from posenc_export.models.parts import float64
from posenc_export.models.parts.norms import RMSNorm
from posenc_export.shared.refusal import refusal


class Projection(torch.nn.Module):
    """What most projections do not have: a gate of the outputs, and factors of rotated queries."""

    def gated(self, x: Tensor, y: Tensor) -> Tensor:
        """x [B,S,E] and attention outputs y [B,S,H*D] to [B,S,H*D]."""
        return y

    def exact_gated(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x [n,E] and y [n,H*D] to [n,H*D], float64."""
        return y

    def scaled(self, q: Tensor) -> Tensor:
        """Rotated queries [B,S,H,D] to the same shape."""
        return q

    def exact_scaled(self, q: np.ndarray) -> np.ndarray:
        """Rotated queries [n,H,D] to the same shape, float64."""
        return q


class Grouped(Projection):
    """One linear layer for queries, keys and values. Keys and values may have fewer heads than
    queries (Ainslie et al. 2023, GQA).

    Args:
        width, heads, kv_heads, head_size: E, H, K, D.
        bias, output_bias: whether queries, keys and values, and the output have biases.
        clip: clamp queries, keys and values to -clip .. clip, above 0 (MPT); None for no bound.
        gate: multiply attention outputs by the sigmoid of another projection of x (Qwen3-Next).
        query_factors: multiply rotated queries by a trained factor for each entry of a head, which
            the heads share (TimesFM 2.5).
    """

    factors: Optional[Tensor]

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        bias: bool = False,
        output_bias: bool = False,
        clip: Optional[float] = None,
        gate: bool = False,
        query_factors: bool = False,
    ) -> None:
        super().__init__()
        if clip is not None and not clip > 0:
            raise refusal("projection grouped", "clip to be above 0", clip)
        self.clip = clip or 0.0
        self.sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
        self.head_size = self.value_size = head_size
        self.qkv = torch.nn.Linear(width, sum(self.sizes), bias=bias)
        self.gate = torch.nn.Linear(width, self.sizes[0], bias=bias) if gate else None
        self.output = torch.nn.Linear(self.sizes[0], width, bias=output_bias)
        factors = torch.nn.Parameter(torch.ones(head_size)) if query_factors else None
        self.register_parameter("factors", factors)

    def gated(self, x: Tensor, y: Tensor) -> Tensor:
        return y if self.gate is None else y * torch.sigmoid(self.gate(x))

    def exact_gated(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return y if self.gate is None else y / (1 + np.exp(-float64.linear(self.gate, x)))

    def scaled(self, q: Tensor) -> Tensor:
        factors = self.factors  # TorchScript narrows types of variables only
        return q if factors is None else q * factors

    def exact_scaled(self, q: np.ndarray) -> np.ndarray:
        return q if self.factors is None else q * float64.numbers(self.factors)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """x [B,S,E] to q [B,S,H*D], k and v [B,S,K*D]."""
        projected = self.qkv(x)
        if self.clip > 0:
            projected = projected.clamp(-self.clip, self.clip)
        q, k, v = projected.split(self.sizes, dim=-1)
        return q, k, v

    def exact(self, x: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x [n,E] to q [n,H,D], k and v [n,K,D], float64."""
        projected = float64.linear(self.qkv, x).reshape(len(x), -1, self.head_size)
        if self.clip:
            projected = np.maximum(np.minimum(projected, self.clip), -self.clip)
        queries, keys = self.sizes[0] // self.head_size, self.sizes[1] // self.head_size
        q, k, v = np.split(projected, [queries, queries + keys], axis=1)
        return q, k, v


class Queries(torch.nn.Module):
    """Queries only, to read an encoder (Vaswani et al. 2017, 3.2.3). Args as Grouped."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        bias: bool = False,
        output_bias: bool = False,
    ) -> None:
        super().__init__()
        self.query = torch.nn.Linear(width, heads * head_size, bias=bias)
        self.output = torch.nn.Linear(heads * head_size, width, bias=output_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to q [B,S,H*D]."""
        return self.query(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,E] to [n,H*D], float64."""
        return float64.linear(self.query, x)


class Latent(Projection):
    """Multi-head Latent Attention: low-rank keys and values, and optionally low-rank queries
    (DeepSeek-AI 2024, DeepSeek-V2, 2.1.2).

    Keys and values of all heads come from a latent vector of size `rank`. The first `rotary`
    entries of each key are rotated and shared by all heads; the others belong to the head. The
    cache holds full keys and values, not latent vectors.

    Args:
        width, heads, kv_heads, head_size: E, H, K = H, and head size D of queries and keys.
        rotary: number of rotated entries r of a head, below D; they are the first.
        value_size: head size of values.
        rank, query_rank: size of the latent vector of keys and values, and of that of queries; 0
            projects queries directly from hidden states.
        bias: whether the projections to latent vectors and the output projection have biases.
        epsilon: epsilon of both norms.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        rotary: int,
        value_size: int,
        rank: int,
        query_rank: int = 0,
        bias: bool = False,
        epsilon: float = 1e-6,
    ) -> None:
        super().__init__()
        if kv_heads != heads:
            got = f"{kv_heads} and {heads}"
            rule = "kv_heads to equal heads"
            raise refusal("projection latent", rule, got, f"set kv_heads={heads}")
        if not 1 <= rotary < head_size or min(value_size, rank) < 1 or query_rank < 0:
            rule = f"rotary to be 1 .. {head_size - 1}, value_size and rank at least 1, query_rank "
            got = f"{rotary}, {value_size}, {rank} and {query_rank}"
            raise refusal("projection latent", f"{rule}at least 0", got)
        self.heads, self.rotary, self.rank, self.value_size = heads, rotary, rank, value_size
        self.parts = [heads * (head_size - rotary), heads * value_size]
        self.query_down: torch.nn.Module = torch.nn.Identity()
        self.query_norm: torch.nn.Module = torch.nn.Identity()
        if query_rank:
            self.query_down = torch.nn.Linear(width, query_rank, bias=bias)
            self.query_norm = RMSNorm(query_rank, epsilon)
        self.query_up = torch.nn.Linear(query_rank or width, heads * head_size, bias=False)
        self.down = torch.nn.Linear(width, rank + rotary, bias=bias)
        self.norm = RMSNorm(rank, epsilon)
        self.up = torch.nn.Linear(rank, sum(self.parts), bias=False)
        self.output = torch.nn.Linear(heads * value_size, width, bias=bias)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """x [B,S,E] to q and k [B,S,H*D], v [B,S,H*value_size]."""
        q = self.query_up(self.query_norm(self.query_down(x)))
        latent, rotated = self.down(x).split([self.rank, self.rotary], dim=-1)
        own, v = self.up(self.norm(latent)).split(self.parts, dim=-1)
        shared = rotated.unsqueeze(2).expand(-1, -1, self.heads, -1)  # [B,S,H,r]
        k = torch.cat((shared, own.unflatten(2, [self.heads, -1])), dim=3)  # [B,S,H,D]
        return q, k.flatten(2), v

    def exact(self, x: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute x [n,E] to q and k [n,H,D], v [n,H,value_size], float64, one head at a time."""
        inputs = x
        if isinstance(self.query_down, torch.nn.Linear):
            norm: Any = self.query_norm
            inputs = norm.exact(float64.linear(self.query_down, x))
        q = float64.linear(self.query_up, inputs).reshape(len(x), self.heads, -1)
        compressed = float64.linear(self.down, x)
        rotated, latent = compressed[:, self.rank :], compressed[:, : self.rank]
        own_and_values = float64.linear(self.up, self.norm.exact(latent))
        own, size = self.parts[0] // self.heads, self.value_size
        keys, values = [], []
        for head in range(self.heads):
            of_head = own_and_values[:, head * own : (head + 1) * own]
            keys.append(np.concatenate((rotated, of_head), axis=1))
            begin = self.parts[0] + head * size
            values.append(own_and_values[:, begin : begin + size])
        return q, np.stack(keys, 1), np.stack(values, 1)


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
