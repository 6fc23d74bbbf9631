"""Gated delta rule: linear attention that forgets and corrects (Yang et al. 2024)."""

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import PositionEncoding, StateSpec
from posenc_export.models.config import AttentionConfig
from posenc_export.models.linear_attention import check_plain
from posenc_export.models.parts import build, float64
from posenc_export.ops import recurrence

EPSILON = 1e-6  # added to squared lengths of queries and keys


class GatedDelta(torch.nn.Module):
    """S_t = S + r k (v - S^T k)^T with S = e^g S_(t-1), y = rms(S_t^T q / sqrt(D)) silu(z). q, k
    and v are filtered over the last tokens (parts.delta.Delta); q and k have length 1. With
    a rank of the projection, g is a vector of D numbers, and the gate is sigmoid(z).

    States: the last inputs of the filters [B,n-1,C], and S [B,H,D,V], both float32. The cost of a
    step does not depend on the position. Only the order of tokens matters.

    Args:
        width: model width E.
        config: sizes and projection; scores have no settings.
        encoding: one without rotations, biases and scores.
    """

    filters = True  # reads a token together with its neighbours

    def __init__(self, width: int, config: AttentionConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        check_plain("gated delta rule", config, encoding, ("causal",), ("rotate",))
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.encoding, self.epsilon = encoding, EPSILON
        self.projection = build(
            "projection", config.projection, width, config.heads, config.kv_heads, config.head_size
        )
        keys = config.kv_heads * config.head_size
        self.value_size: int = self.projection.value_size
        self.parts = [keys, keys, config.heads * self.value_size]
        self.past: int = self.projection.past  # inputs that filters read again

    @torch.jit.unused
    def states(self) -> List[StateSpec]:
        """Return the states that are kept between calls, in the order of `forward`."""
        tail = (self.past, sum(self.parts))
        memory = (self.heads, self.head_size, self.value_size)
        sizes = {"tail": tail, "memory": memory}
        return [StateSpec(name, size, dtype="float32") for name, size in sizes.items()]

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        coordinates: Tensor,
        key_positions: Tensor,
        mask: Tensor,
        write_index: Tensor,
        states: List[Tensor],
    ) -> Tuple[Tensor, List[Tensor]]:
        """Shapes as Attention.forward. Only whether positions are -1 is used."""
        # With padding last, it follows the tokens of a row, and its rates and decays are 0.
        order, count = recurrence.valid_first(positions)
        columns = torch.arange(x.size(1), device=x.device).unsqueeze(0)
        source = torch.zeros_like(order).scatter(1, order, columns.expand_as(order))
        mixed, gates, decay, rate = self.projection(ops.select_tokens(x, source))
        valid = columns.lt(count).unsqueeze(2).to(torch.float32)
        filtered = recurrence.short_convolution(mixed, states[0], self.projection.filters())
        pairs, v = filtered.split([2 * self.parts[0], self.parts[2]], dim=-1)
        heads = ops.split_heads(pairs, 2 * self.kv_heads)  # [B,S,2K,D]
        size, epsilon = self.head_size, self.epsilon / self.head_size
        length_1 = torch.full([size], size**-0.5, device=x.device)
        heads = torch.nn.functional.rms_norm(heads, [size], length_1, epsilon)
        q, k = heads.split([self.kv_heads, self.kv_heads], dim=2)
        y, memory = recurrence.gated_delta(
            q,
            k,
            ops.split_heads(v, self.heads),
            decay * valid,
            rate * valid,
            states[1],
        )
        y = self.projection.gated(y, gates).to(x.dtype)  # [B,S,H*V]
        last = count + torch.arange(self.past, device=x.device)  # [B,n-1]
        tail = ops.select_tokens(torch.cat((states[0], mixed), dim=1), last)
        return self.projection.output(ops.select_tokens(y, order)), [tail, memory]

    def exact(
        self,
        x: np.ndarray,
        positions: range,
        places: Sequence[Any],
        types: Optional[np.ndarray] = None,
    ) -> np.ndarray:
        """One row x [n,E], positions and coordinates to [n,E], float64, token by token."""
        filtered, gates, decay, rate = self.projection.exact(x)
        ends = np.cumsum(self.parts)[:-1]
        q, k, v = (
            part.reshape(len(x), heads, -1)
            for part, heads in zip(
                np.split(filtered, ends, axis=1),
                (self.kv_heads, self.kv_heads, self.heads),
                strict=True,
            )
        )
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + EPSILON) for part in (q, k))
        decay = decay.reshape(len(x), self.heads, -1, 1)
        outputs = np.zeros_like(v)
        for head in range(self.heads):
            group = head * self.kv_heads // self.heads
            memory = np.zeros((self.head_size, self.value_size))
            for t in range(len(x)):
                memory = memory * np.exp(decay[t, head])
                error = v[t, head] - k[t, group] @ memory
                memory = memory + rate[t, head] * np.outer(k[t, group], error)
                outputs[t, head] = q[t, group] @ memory / np.sqrt(self.head_size)
        gated = self.projection.exact_gated(outputs, gates)
        return float64.linear(self.projection.output, gated)
