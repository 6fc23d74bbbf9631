"""Activation functions by name, each in torch and in an independent form in float64 numpy."""

import math

import numpy as np
import torch
from torch import Tensor


class SiLU(torch.nn.Module):
    """x sigmoid(x) (Hendrycks and Gimpel 2016; Elfwing et al. 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x * (1 + np.tanh(x / 2)) / 2


class GELU(torch.nn.Module):
    """x Phi(x), with Phi of the standard normal distribution (Hendrycks and Gimpel 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))


class GELUTanh(torch.nn.Module):
    """The tanh approximation of GELU, used by GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


class ReLU(torch.nn.Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.relu(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x, 0.0)


class Tanh(torch.nn.Module):
    """tanh(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        return np.tanh(x)


ACTIVATIONS = {"silu": SiLU, "gelu": GELU, "gelu_tanh": GELUTanh, "relu": ReLU, "tanh": Tanh}


def activation(name: str) -> torch.nn.Module:
    """Build an activation by name.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(
            f"mlp: expected activation to be one of {', '.join(ACTIVATIONS)}, got {name!r}"
        )
    return ACTIVATIONS[name]()
