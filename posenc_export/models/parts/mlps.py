"""MLPs, the second sublayer of a layer, and their activation functions, those of torch with an
independent form in float64. They act on each token separately.

Args of all MLPs: model width E, hidden width, key of ACTIVATIONS, whether layers have biases.
"""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts import float64

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


class Plain(torch.nn.Module):
    """down(act(up x)) (Vaswani et al. 2017, 3.3)."""

    def __init__(
        self, width: int, hidden: int, activation: Name = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, hidden, bias=bias)
        self.down = torch.nn.Linear(hidden, width, bias=bias)
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to [B,S,E]."""
        return self.down(self.activation(self.up(x)))

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,E], float64."""
        hidden = self.activation.exact(float64.linear(self.up, x))  # type: ignore[operator]
        return float64.linear(self.down, hidden)


class Gated(torch.nn.Module):
    """down(act(gate x) * up x) (Shazeer 2020, GLU Variants Improve Transformer)."""

    def __init__(
        self, width: int, hidden: int, activation: Name = "silu", bias: bool = False
    ) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(width, hidden, bias=bias)
        self.up = torch.nn.Linear(width, hidden, bias=bias)
        self.down = torch.nn.Linear(hidden, width, bias=bias)
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to [B,S,E]."""
        return self.down(self.activation(self.gate(x)) * self.up(x))

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,E], float64."""
        gate = self.activation.exact(float64.linear(self.gate, x))  # type: ignore[operator]
        return float64.linear(self.down, float64.linear(self.up, x) * gate)
