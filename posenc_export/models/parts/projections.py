"""From hidden states to queries, keys and values, and from mixed values back."""

from typing import Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts import exact


class Grouped(torch.nn.Module):
    """One packed linear layer for queries, keys and values; keys and values may have fewer heads (Ainslie et al. 2023, GQA).

    Args:
        width: model width E.
        heads, kv_heads, head_size: H, K, D.
        bias: on queries, keys and values.
        output_bias: on the way back.
        clip: queries, keys and values are kept within -clip .. clip (MPT); no bound where None.

    Raises:
        ValueError: clip not above 0.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_size: int, bias: bool = False, output_bias: bool = False, clip: Optional[float] = None
    ) -> None:
        super().__init__()
        if clip is not None and not clip > 0:
            raise ValueError(f"projection grouped: clip is above 0, got {clip}")
        self.clip = clip or 0.0
        self.sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
        self.head_size = self.value_size = head_size
        self.qkv = torch.nn.Linear(width, sum(self.sizes), bias=bias)
        self.output = torch.nn.Linear(self.sizes[0], width, bias=output_bias)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """x [B,S,E] to q [B,S,H*D], k and v [B,S,K*D]."""
        projected = self.qkv(x)
        if self.clip > 0:
            projected = projected.clamp(-self.clip, self.clip)
        q, k, v = projected.split(self.sizes, dim=-1)
        return q, k, v

    def exact(self, x: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x [n,E] to q [n,H,D], k and v [n,K,D], float64."""
        projected, queries = exact.linear(self.qkv, x).reshape(len(x), -1, self.head_size), self.sizes[0] // self.head_size
        heads = self.sizes[1] // self.head_size
        if self.clip:
            projected = np.maximum(np.minimum(projected, self.clip), -self.clip)
        return projected[:, :queries], projected[:, queries : queries + heads], projected[:, queries + heads :]
