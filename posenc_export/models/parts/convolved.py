"""The weights of a convolution in place of attention."""

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts import float64
from posenc_export.models.parts.activations import activation as activation_of
from posenc_export.models.parts.norms import LayerNorm


class Convolved(torch.nn.Module):
    """Weights of the convolution of a Conformer, in causal form (Gulati et al. 2020, 2.2): a gated
    linear layer, a filter for each entry, a norm, an activation, output.

    Args:
        width: E; heads, kv_heads and head_size are not used.
        kernel: length of the filters in tokens.
        activation: key of ACTIVATIONS in parts/activations.py.
        epsilon: epsilon of the norm.
    """

    least = {"kernel": 1}
    most = {"kernel": 1 << 16}
    above = {"epsilon": 0}

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        kernel: int = 31,
        activation: str = "silu",
        epsilon: float = 1e-5,
    ) -> None:
        super().__init__()
        self.past = kernel - 1
        self.inputs = torch.nn.Linear(width, 2 * width, bias=False)
        self.filters = torch.nn.Conv1d(width, width, kernel, groups=width, bias=False)
        self.norm, self.activation = LayerNorm(width, epsilon), activation_of(activation)
        self.output = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E], padding last, to the inputs of the output layer [B,S,E]."""
        values, gates = self.inputs(x).chunk(2, dim=-1)
        gated = (values * torch.sigmoid(gates)).transpose(1, 2)
        y = self.filters(torch.nn.functional.pad(gated, [self.past, 0])).transpose(1, 2)
        return self.activation(self.norm(y))

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,E] to the inputs of the output layer [n,E], float64."""
        values, gates = np.split(float64.linear(self.inputs, x), 2, axis=1)
        gated = values * (1 + np.tanh(gates / 2)) / 2
        filters, y = float64.numbers(self.filters.weight)[:, 0], np.zeros_like(gated)
        for back, weights in enumerate(filters.T[::-1][: len(x)]):
            y[back:] += gated[: len(x) - back] * weights
        return np.asarray(self.activation.exact(self.norm.exact(y)))  # type: ignore[operator]
