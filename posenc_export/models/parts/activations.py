"""Activation functions by name, those of torch with an independent form in float64 numpy."""

import math

import numpy as np
import torch

from posenc_export.shared.refusal import refusal


class SiLU(torch.nn.SiLU):
    """x sigmoid(x) (Hendrycks and Gimpel 2016; Elfwing et al. 2018)."""

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x * (1 + np.tanh(x / 2)) / 2


class GELU(torch.nn.GELU):
    """x Phi(x), with Phi of the standard normal distribution (Hendrycks and Gimpel 2016)."""

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))


class GELUTanh(torch.nn.GELU):
    """The tanh approximation of GELU, used by GPT-2."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")

    def exact(self, x: np.ndarray) -> np.ndarray:
        # Not by exp, which overflows.
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))) / 2


class ReLU(torch.nn.ReLU):
    """max(x, 0)."""

    def exact(self, x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x, 0.0)


ACTIVATIONS = {"silu": SiLU, "gelu": GELU, "gelu_tanh": GELUTanh, "relu": ReLU}


def activation(name: str) -> torch.nn.Module:
    """Build an activation by name. ValueError: an unknown one."""
    if name not in ACTIVATIONS:
        raise refusal("mlp", f"activation to be one of {', '.join(ACTIVATIONS)}", repr(name))
    return ACTIVATIONS[name]()
