"""Norms of queries and keys before rotation (Henry et al. 2020; Dehghani et al. 2023).

Args of all: number of heads N, head size D, and the norm {"name": "rms" or "layer", ...}.
"""

from typing import Any, Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts.float64 import numbers
from posenc_export.models.parts.norms import NORMS
from posenc_export.shared import registry


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


class SeparateHeadNorms(SharedHeadNorm):
    """Norm over each head, with a weight [N,D] in place of that of the norm (StableLM 2)."""

    def __init__(self, heads: int, size: int, norm: Mapping[str, Any]) -> None:
        no_bias = {"bias": False} if norm.get("name") == "layer" else {}
        super().__init__(heads, size, {**norm, "weight": False, **no_bias})
        self.weight = torch.nn.Parameter(torch.ones(heads, size))

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,N*D] to the same shape."""
        return (self.norm(x.unflatten(2, [self.heads, -1])) * self.weight).flatten(2)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,N,D], float64."""
        return super().exact(x) * numbers(self.weight)


class ProjectionNorm(torch.nn.Module):
    """Norm over all heads together (OLMo 2)."""

    def __init__(self, heads: int, size: int, norm: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm = registry.build("norm", NORMS, norm, heads * size)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,N*D] to the same shape."""
        return self.norm(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,N,D], float64."""
        return self.norm.exact(x.reshape(len(x), -1)).reshape(x.shape)
