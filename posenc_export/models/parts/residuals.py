"""Arrangements of norms and residual sums around attention and MLP.

A layer calls the four methods of an arrangement in order: x is the input of the layer, y the output of a sublayer, and `between` the result of
`after_attention`. `exact` computes the whole layer.
"""

from typing import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Exact = Callable[[np.ndarray], np.ndarray]


class Pre(torch.nn.Module):
    """x + attention(norm x), then x + mlp(norm x) (Xiong et al. 2020; GPT-2, Llama).

    Args:
        norms: two norms.
    """

    COUNT = 2

    def __init__(self, norms: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms

    def attention_input(self, x: Tensor) -> Tensor:
        return self.attention_norm(x)

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def mlp_input(self, x: Tensor, between: Tensor) -> Tensor:
        return self.mlp_norm(between)

    def after_mlp(self, between: Tensor, y: Tensor) -> Tensor:
        return between + y

    def exact(self, x: np.ndarray, attention: Exact, mlp: Exact) -> np.ndarray:
        """x [n,E], float64."""
        x = x + attention(self.attention_norm.exact(x))  # type: ignore[operator]
        return x + mlp(self.mlp_norm.exact(x))  # type: ignore[operator]


class Alone(torch.nn.Module):
    """mlp(x + attention(norm x)), for layers with attention only: self-attention in a decoder that reads an encoder (T5, Whisper).

    Args:
        norms: one norm.
    """

    COUNT = 1

    def __init__(self, norms: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        (self.attention_norm,) = norms

    def attention_input(self, x: Tensor) -> Tensor:
        return self.attention_norm(x)

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def mlp_input(self, x: Tensor, between: Tensor) -> Tensor:
        return between

    def after_mlp(self, between: Tensor, y: Tensor) -> Tensor:
        return y

    def exact(self, x: np.ndarray, attention: Exact, mlp: Exact) -> np.ndarray:
        """x [n,E], float64."""
        return mlp(x + attention(self.attention_norm.exact(x)))  # type: ignore[operator]


class Post(torch.nn.Module):
    """norm(x + attention x), then norm(x + mlp x) (Vaswani et al. 2017, 3.1; BERT).

    Args:
        norms: two norms.
    """

    COUNT = 2

    def __init__(self, norms: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms

    def attention_input(self, x: Tensor) -> Tensor:
        return x

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        return self.attention_norm(x + y)

    def mlp_input(self, x: Tensor, between: Tensor) -> Tensor:
        return between

    def after_mlp(self, between: Tensor, y: Tensor) -> Tensor:
        return self.mlp_norm(between + y)

    def exact(self, x: np.ndarray, attention: Exact, mlp: Exact) -> np.ndarray:
        """x [n,E], float64."""
        x = self.attention_norm.exact(x + attention(x))  # type: ignore[operator]
        return self.mlp_norm.exact(x + mlp(x))  # type: ignore[no-any-return,operator]


class After(torch.nn.Module):
    """x + norm(attention x), then x + norm(mlp x) (Liu et al. 2022, Swin v2; OLMo 2).

    Args:
        norms: two norms.
    """

    COUNT = 2

    def __init__(self, norms: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms

    def attention_input(self, x: Tensor) -> Tensor:
        return x

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.attention_norm(y)

    def mlp_input(self, x: Tensor, between: Tensor) -> Tensor:
        return between

    def after_mlp(self, between: Tensor, y: Tensor) -> Tensor:
        return between + self.mlp_norm(y)

    def exact(self, x: np.ndarray, attention: Exact, mlp: Exact) -> np.ndarray:
        """x [n,E], float64."""
        x = x + self.attention_norm.exact(attention(x))  # type: ignore[operator]
        return x + self.mlp_norm.exact(mlp(x))  # type: ignore[operator]


class Sandwich(torch.nn.Module):
    """x + norm(attention(norm x)), then x + norm(mlp(norm x)) (Ding et al. 2021, CogView; Gemma 2 and 3).

    Args:
        norms: four norms, in the order of computation.
    """

    COUNT = 4

    def __init__(self, norms: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm = norms

    def attention_input(self, x: Tensor) -> Tensor:
        return self.attention_norm(x)

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.attention_output_norm(y)

    def mlp_input(self, x: Tensor, between: Tensor) -> Tensor:
        return self.mlp_norm(between)

    def after_mlp(self, between: Tensor, y: Tensor) -> Tensor:
        return between + self.mlp_output_norm(y)

    def exact(self, x: np.ndarray, attention: Exact, mlp: Exact) -> np.ndarray:
        """x [n,E], float64."""
        x = x + self.attention_output_norm.exact(attention(self.attention_norm.exact(x)))  # type: ignore[operator]
        return x + self.mlp_output_norm.exact(mlp(self.mlp_norm.exact(x)))  # type: ignore[operator]


class Parallel(torch.nn.Module):
    """x + attention(norm x) + mlp(norm x), with one norm for both (Wang and Komatsuzaki 2021, GPT-J; Command R).

    Args:
        norms: one norm.
    """

    COUNT = 1

    def __init__(self, norms: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        (self.attention_norm,) = norms

    def attention_input(self, x: Tensor) -> Tensor:
        return self.attention_norm(x)

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def mlp_input(self, x: Tensor, between: Tensor) -> Tensor:
        return self.attention_norm(x)

    def after_mlp(self, between: Tensor, y: Tensor) -> Tensor:
        return between + y

    def exact(self, x: np.ndarray, attention: Exact, mlp: Exact) -> np.ndarray:
        """x [n,E], float64."""
        read = self.attention_norm.exact(x)  # type: ignore[operator]
        return x + (attention(read) + mlp(read))


class ParallelNorms(torch.nn.Module):
    """x + attention(norm x) + mlp(norm x), with a norm for each (Black et al. 2022, GPT-NeoX).

    Args:
        norms: two norms.
    """

    COUNT = 2

    def __init__(self, norms: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms

    def attention_input(self, x: Tensor) -> Tensor:
        return self.attention_norm(x)

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def mlp_input(self, x: Tensor, between: Tensor) -> Tensor:
        return self.mlp_norm(x)

    def after_mlp(self, between: Tensor, y: Tensor) -> Tensor:
        return between + y

    def exact(self, x: np.ndarray, attention: Exact, mlp: Exact) -> np.ndarray:
        """x [n,E], float64."""
        return x + (attention(self.attention_norm.exact(x)) + mlp(self.mlp_norm.exact(x)))  # type: ignore[operator]
