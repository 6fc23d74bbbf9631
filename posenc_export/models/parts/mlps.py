"""MLPs, the second sublayer of a layer. They act on each token separately.

Args of all: model width E, hidden width, key of ACTIVATIONS, whether linear layers have biases.
"""

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts import float64
from posenc_export.models.parts.activations import ACTIVATIONS, Name


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
