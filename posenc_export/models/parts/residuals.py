"""Arrangements of norms and residual sums around attention and MLP, each with its formula.

A layer calls the four methods of an arrangement in order: x is the input of the layer, y the output
of a sublayer, and `between` the result of `after_attention`. `exact` computes the whole layer.
"""

from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor

Exact = Callable[[np.ndarray], np.ndarray]


class PreNorm(torch.nn.Module):
    """x + attention(norm x), then x + mlp(norm x) (Xiong et al. 2020; GPT-2, Llama)."""

    __constants__ = ["of_sum"]
    of_sum = False  # whether norms act on the residual sum behind their sublayer, not on its input

    def __init__(self, attention_norm: torch.nn.Module, mlp_norm: torch.nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm

    def attention_input(self, x: Tensor) -> Tensor:
        return x if self.of_sum else self.attention_norm(x)

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        return self.attention_norm(x + y) if self.of_sum else x + y

    def mlp_input(self, between: Tensor) -> Tensor:
        return between if self.of_sum else self.mlp_norm(between)

    def after_mlp(self, between: Tensor, y: Tensor) -> Tensor:
        return self.mlp_norm(between + y) if self.of_sum else between + y

    def exact(self, x: np.ndarray, attention: Exact, mlp: Exact) -> np.ndarray:
        """x [n,E], float64."""
        attention_norm: Any = self.attention_norm
        mlp_norm: Any = self.mlp_norm
        if self.of_sum:
            between = attention_norm.exact(x + attention(x))
            return np.asarray(mlp_norm.exact(between + mlp(between)))
        between = x + attention(attention_norm.exact(x))
        return between + mlp(mlp_norm.exact(between))


class PostNorm(PreNorm):
    """norm(x + attention x), then norm(x + mlp x) (Vaswani et al. 2017, 3.1; BERT)."""

    of_sum = True
