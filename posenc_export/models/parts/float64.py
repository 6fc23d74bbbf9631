"""Conversion of weights to float64 for oracles, one tensor at a time, to save memory."""

import numpy as np
import torch
from torch import Tensor

# Outputs of a linear layer that are computed at a time; the head of a large vocabulary has more.
ROWS = 8192


def numbers(tensor: Tensor | None) -> np.ndarray:
    """Return a tensor as float64; None gives 0."""
    return np.zeros(()) if tensor is None else tensor.detach().double().numpy()


def attend(scores: np.ndarray, values: np.ndarray, sink: float = -np.inf) -> np.ndarray:
    """Return softmax of scores [n] and a sink without value, times values [n,D]: [D], float64."""
    largest = max(scores.max(), sink)
    weights = np.exp(scores - largest)
    return weights @ values / (weights.sum() + np.exp(sink - largest))


def linear(layer: torch.nn.Linear, x: np.ndarray) -> np.ndarray:
    """Apply a linear layer to x [...,n], to [...,m], in float64."""
    parts = [x @ numbers(rows).T for rows in layer.weight.split(ROWS)]
    return np.concatenate(parts, axis=-1) + numbers(layer.bias)
