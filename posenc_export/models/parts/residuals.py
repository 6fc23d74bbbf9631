"""Arrangements of norms and residual sums around attention and MLP, each with its formula.

A layer calls the four methods of an arrangement in order: x is the input of the layer, y the output
of a sublayer, and `between` the result of `after_attention`. `exact` computes the whole layer.
"""

from typing import Any, Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts.norms import Identity

Exact = Callable[[np.ndarray], np.ndarray]


class Residual(torch.nn.Module):
    """The computation of all arrangements. A subclass gives the values of one of them.

    `NORMS`: names of the norms in the order of computation; a norm that is not named leaves its
    tensor unchanged. `of_sum`: attention_norm and mlp_norm act on the residual sum behind their
    sublayer, else on its input.
    """

    __constants__ = ["of_sum"]
    NORMS: Sequence[str] = ("attention_norm", "mlp_norm")
    of_sum = False

    def __init__(self, norms: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        named = dict(zip(self.NORMS, norms, strict=True))
        self.attention_norm = named["attention_norm"]
        self.attention_output_norm = named.get("attention_output_norm", Identity())
        self.mlp_norm = named["mlp_norm"]
        self.mlp_output_norm = named.get("mlp_output_norm", Identity())

    def attention_input(self, x: Tensor) -> Tensor:
        return x if self.of_sum else self.attention_norm(x)

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        if self.of_sum:
            return self.attention_norm(x + y)
        return x + self.attention_output_norm(y)

    def mlp_input(self, between: Tensor) -> Tensor:
        return between if self.of_sum else self.mlp_norm(between)

    def after_mlp(self, between: Tensor, y: Tensor) -> Tensor:
        if self.of_sum:
            return self.mlp_norm(between + y)
        return between + self.mlp_output_norm(y)

    def exact(self, x: np.ndarray, attention: Exact, mlp: Exact) -> np.ndarray:
        """x [n,E], float64."""
        attention_norm: Any = self.attention_norm
        mlp_norm: Any = self.mlp_norm
        read = x if self.of_sum else attention_norm.exact(x)
        between = self._added(x, attention(read), attention_norm, self.attention_output_norm)
        read = between if self.of_sum else mlp_norm.exact(between)
        return self._added(between, mlp(read), mlp_norm, self.mlp_output_norm)

    def _added(self, x: np.ndarray, y: np.ndarray, norm: Any, output_norm: Any) -> np.ndarray:
        if self.of_sum:
            return np.asarray(norm.exact(x + y))
        return x + np.asarray(output_norm.exact(y))


class PreNorm(Residual):
    """x + attention(norm x), then x + mlp(norm x) (Xiong et al. 2020; GPT-2, Llama)."""


class PostNorm(Residual):
    """norm(x + attention x), then norm(x + mlp x) (Vaswani et al. 2017, 3.1; BERT)."""

    of_sum = True


class SandwichNorm(Residual):
    """x + norm(attention(norm x)), then x + norm(mlp(norm x)) (Ding et al. 2021; Gemma 2)."""

    NORMS = ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")
