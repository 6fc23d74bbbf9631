"""The attention block, written once for every encoding and target."""

import math
from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.encodings.base import PositionEncoding
from posenc_export.models.config import AttentionConfig


class Attention(torch.nn.Module):
    """Grouped-query attention over a cache: project, rotate, append, attend, project.

    Args:
        config: sizes and biases.
        encoding: acts on queries and keys here; its bias comes with the mask.
    """

    def __init__(self, config: AttentionConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.sizes = [config.heads * config.head_size, config.kv_heads * config.head_size, config.kv_heads * config.head_size]
        self.scale = 1.0 / math.sqrt(config.head_size)
        self.encoding = encoding
        self.qkv = torch.nn.Linear(config.width, sum(self.sizes), bias=config.qkv_bias)
        self.output = torch.nn.Linear(self.sizes[0], config.width, bias=config.output_bias)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, write_index: Tensor, past_key: Tensor, past_value: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """x [B,S,E], positions [B,S], mask [B,1 or H,S,T], write_index [B], past [B,K,P,D] twice to x's shape, present [B,K,T,D] twice."""
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q, k = self.encoding.rotate(ops.split_heads(q, self.heads), ops.split_heads(k, self.kv_heads), positions)
        keys = ops.append(past_key, k, write_index)
        values = ops.append(past_value, ops.split_heads(v, self.kv_heads), write_index)
        return self.output(ops.attend(q, keys, values, mask, self.scale)), keys, values


class AttentionBlock(torch.nn.Module):
    """One attention with its encoding, from hidden states to hidden states: what an engineer drops into a model of their own.

    Args:
        config: the block's description.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.source: Dict[str, Any] = {}  # how to build the same weights again, if there is a way (models.presets)
        self.config = config
        self.encoding = encodings.build(config.encoding, config.geometry)
        self.attention = Attention(config, self.encoding)
        self.causal = config.causal

    def forward(self, x: Tensor, positions: Tensor, key_positions: Tensor, write_index: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S,E], positions [B,S], key_positions [B,T], write_index [B], states [key, value] to output [B,S,E] and new states."""
        x = self.encoding.embed(x, positions)
        mask = ops.attention_mask(positions, key_positions, self.encoding.bias(positions, key_positions), self.causal, x)
        y, keys, values = self.attention(x, positions, mask, write_index, states[0], states[1])
        return y, [keys, values]
