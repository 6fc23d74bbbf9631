"""Norms over the last axis: RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba et al. 2016), none."""

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts.float64 import numbers


class RMSNorm(torch.nn.RMSNorm):
    """w x / sqrt(mean(x^2) + epsilon), over `size` entries."""

    def __init__(self, size: int, epsilon: float = 1e-5) -> None:
        super().__init__(size, eps=epsilon)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [...,size], float64."""
        length = np.sqrt(np.einsum("...i,...i->...", x, x) / x.shape[-1] + self.eps)
        return x / length[..., None] * numbers(self.weight)


class LayerNorm(torch.nn.LayerNorm):
    """w (x - mean x) / sqrt(var x + epsilon) + b over `size` entries."""

    def __init__(self, size: int, epsilon: float = 1e-5) -> None:
        super().__init__(size, eps=epsilon)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [...,size], float64."""
        centred = x - x.sum(-1, keepdims=True) / x.shape[-1]
        squares = np.einsum("...i,...i->...", centred, centred) / x.shape[-1]
        scaled = centred / np.sqrt(squares + self.eps)[..., None]
        return scaled * numbers(self.weight) + numbers(self.bias)


class Identity(torch.nn.Module):
    """x unchanged."""

    def __init__(self, size: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x


NORMS = {"rms": RMSNorm, "layer": LayerNorm, "none": Identity}
