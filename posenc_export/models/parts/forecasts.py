"""Patches of a series to hidden states, and hidden states to forecasts (Das et al. 2024, TimesFM,
4.2).
"""

from typing import Any, List, Optional

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts import float64
from posenc_export.models.parts.activations import activation as activation_of


class Residual(torch.nn.Module):
    """down(act(up x)) + skip x, of `inputs` entries to `outputs`."""

    def __init__(self, inputs: int, hidden: int, outputs: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(inputs, hidden, bias=bias)
        self.down = torch.nn.Linear(hidden, outputs, bias=bias)
        self.skip = torch.nn.Linear(inputs, outputs, bias=bias)
        self.activation = activation_of(activation)

    def forward(self, x: Tensor, positions: Optional[Tensor] = None) -> Tensor:
        """x [B,S,inputs] to [B,S,outputs]."""
        return self.down(self.activation(self.up(x))) + self.skip(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,inputs] to [n,outputs], float64."""
        x = x.astype(np.float64)
        hidden = self.activation.exact(float64.linear(self.up, x))  # type: ignore[operator]
        return float64.linear(self.down, hidden) + float64.linear(self.skip, x)


class Patches(Residual):
    """Hidden states of patches. The features of a patch are its normalised values, then a number
    for each that is 1 for padding, whose value is 0, and else 0.

    Args:
        width: model width E.
        patch: values of a patch.
        hidden: hidden width.
        activation: key of ACTIVATIONS in parts/activations.py.
    """

    least = {"patch": 1, "hidden": 1}

    def __init__(self, width: int, patch: int, hidden: int, activation: str = "silu") -> None:
        super().__init__(2 * patch, hidden, width, activation, bias=True)
        self.size = 2 * patch


class Forecast(Residual):
    """Mean and quantiles of each of the next values of a series that is normalised like the patch:
    horizon * (1 + quantiles) numbers.

    Args:
        width: model width E.
        horizon: number of values.
        quantiles: levels, such as 0.1 and 0.9.
        hidden: hidden width.
        activation: key of ACTIVATIONS in parts/activations.py.
        symmetric: whether `Forecaster` averages the forecast and that of the negated series.
        positive: whether `Forecaster` replaces numbers below 0 by 0 if no value is below 0.
    """

    least = {"horizon": 1, "hidden": 1}

    def __init__(
        self,
        width: int,
        horizon: int,
        quantiles: List[Any],
        hidden: int,
        activation: str = "silu",
        symmetric: bool = False,
        positive: bool = False,
    ) -> None:
        size = horizon * (1 + len(quantiles))
        super().__init__(width, hidden, size, activation, bias=False)
        self.size = size
