"""Projections of hidden states to queries, keys and values, and of outputs to hidden states."""

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts import float64


class Grouped(torch.nn.Module):
    """One linear layer for queries, keys and values. Keys and values may have fewer heads than
    queries (Ainslie et al. 2023, GQA).

    Args:
        width, heads, kv_heads, head_size: E, H, K, D.
        bias, output_bias: whether queries, keys and values, and the output have biases.
    """

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
        self.sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
        self.head_size = head_size
        self.qkv = torch.nn.Linear(width, sum(self.sizes), bias=bias)
        self.output = torch.nn.Linear(self.sizes[0], width, bias=output_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B,S,E] to q [B,S,H*D], k and v [B,S,K*D]."""
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        return q, k, v

    def exact(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x [n,E] to q [n,H,D], k and v [n,K,D], float64."""
        projected = float64.linear(self.qkv, x).reshape(len(x), -1, self.head_size)
        queries, keys = self.sizes[0] // self.head_size, self.sizes[1] // self.head_size
        q, k, v = np.split(projected, [queries, queries + keys], axis=1)
        return q, k, v
