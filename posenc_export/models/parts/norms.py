"""Norms over the last axis: RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba et al. 2016), none;
and norms of queries and keys before rotation (Henry et al. 2020; Dehghani et al. 2023).
"""

from typing import Any, Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts.float64 import numbers
from posenc_export.shared import registry


class RMSNorm(torch.nn.RMSNorm):
    """w x / sqrt(mean(x^2) + epsilon), over `size` entries."""

    def __init__(self, size: int, epsilon: float = 1e-5) -> None:
        super().__init__(size, eps=epsilon)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [...,size], float64."""
        length = np.sqrt(np.einsum("...i,...i->...", x, x) / x.shape[-1] + self.eps)
        return x / length[..., None] * numbers(self.weight)


class LayerNorm(torch.nn.LayerNorm):
    """w (x - mean x) / sqrt(var x + epsilon) + b over `size` entries; b = 0 without a bias."""

    def __init__(self, size: int, epsilon: float = 1e-5, bias: bool = True) -> None:
        super().__init__(size, eps=epsilon, bias=bias)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [...,size], float64."""
        centred = x - x.sum(-1, keepdims=True) / x.shape[-1]
        squares = np.einsum("...i,...i->...", centred, centred) / x.shape[-1]
        scaled = centred / np.sqrt(squares + self.eps)[..., None]
        return scaled * numbers(self.weight) + numbers(self.bias)


class Identity(torch.nn.Module):
    """x unchanged, of any shape: no norm, or no MLP. `sizes` are those of other parts."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x


NORMS = {"rms": RMSNorm, "layer": LayerNorm, "none": Identity}


# Norms of heads take their number N, their size D, and the norm {"name": "rms" or "layer", ...}.
class SharedHeadNorm(torch.nn.Module):
    """Norm over each head, with weights shared by all heads (Qwen 3, Gemma 3)."""

    def __init__(self, heads: int, size: int, norm: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads, self.norm = heads, registry.build("norm", NORMS, norm, size)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,N*D] to the same shape."""
        return self.norm(x.unflatten(2, [self.heads, -1])).flatten(2)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,N,D], float64."""
        return np.stack([self.norm.exact(x[:, head]) for head in range(self.heads)], axis=1)
