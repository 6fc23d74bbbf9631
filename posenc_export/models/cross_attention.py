"""Cross-attention of a decoder to the outputs of an encoder (Vaswani et al. 2017, 3.2.3)."""

from typing import Any, List, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import PositionEncoding, StateSpec
from posenc_export.models.config import AttentionConfig
from posenc_export.models.parts import build, float64
from posenc_export.shared.refusal import refusal


def scale_of(config: AttentionConfig, encoding: PositionEncoding) -> float:
    """Return the factor on scores, by default that of the encoding."""
    return encoding.score_scale(config.head_size) if config.scale is None else config.scale


class CrossAttention(torch.nn.Module):
    """softmax(scale q k) v over the keys and values of an encoder. These are inputs of every call,
    so there is no cache.

    Args:
        width: model width E.
        config: sizes, projection, scale, softcap; no sinks.
        encoding: the empty combination of encodings, which gives the default scale.
    """

    def __init__(self, width: int, config: AttentionConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        if config.sinks:
            raise refusal("cross attention", "no sinks", "sinks=True", "leave them out")
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.scale = scale_of(config, encoding)
        self.softcap, self.encoding = config.softcap or 0.0, encoding
        self.projection = build(
            "projection", config.projection, width, config.heads, config.kv_heads, config.head_size
        )

    @torch.jit.unused
    def states(self) -> List[StateSpec]:
        """Return no states: nothing is kept between calls."""
        return []

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
        """x [B,S,E], mask [B,1,S,Q], states: keys and values of the encoder [B,K,Q,D], to
        [B,S,E] and no states. Other inputs as for Attention.forward.
        """
        q = ops.split_heads(self.projection(x), self.heads)  # [B,S,H,D]
        y = ops.attend(q, states[0], states[1], mask, None, self.scale, self.softcap, None)
        return self.projection.output(y), states[:0]

    def exact(
        self,
        x: np.ndarray,
        positions: range,
        places: Sequence[Any],
        keys: np.ndarray,
        values: np.ndarray,
    ) -> np.ndarray:
        """One row x [n,E], keys and values [K,Q,D] to [n,E], float64, one query at a time."""
        q = self.projection.exact(x).reshape(len(x), self.heads, -1)
        weighted_values = np.zeros((len(x), self.heads, values.shape[-1]))
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            for i in range(len(x)):
                scores = keys[group] @ q[i, head] * self.scale
                scores = self.softcap * np.tanh(scores / self.softcap) if self.softcap else scores
                weighted_values[i, head] = float64.attend(scores, values[group])
        return float64.linear(self.projection.output, weighted_values.reshape(len(x), -1))
