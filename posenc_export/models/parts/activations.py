"""Activation functions by name, those of torch with an independent form in float64 numpy."""

import math
from typing import Literal

import numpy as np
import torch

Name = Literal["silu", "gelu"]


class SiLU(torch.nn.SiLU):
    """x sigmoid(x) (Hendrycks and Gimpel 2016; Elfwing et al. 2018)."""

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x * (1 + np.tanh(x / 2)) / 2


class GELU(torch.nn.GELU):
    """x Phi(x), with Phi of the standard normal distribution (Hendrycks and Gimpel 2016)."""

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))


ACTIVATIONS = {"silu": SiLU, "gelu": GELU}
