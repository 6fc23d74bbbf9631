"""Rows that follow from each other by trained weights: read from a table, with gradients through the recurrence that made it."""

from typing import Any, Callable, List, Sequence, Tuple

import torch
from torch import Tensor

# The rows [n,E] that weights give, differentiable.
Recurrence = Callable[[Sequence[Tensor], int], Tensor]


def versions(encoding: torch.nn.Module) -> List[int]:
    """Of all parameters, in order: a number that grows when a parameter is changed in place, as optimisers do."""
    return [parameter._version for parameter in encoding.parameters()]


class Rows(torch.autograd.Function):
    """Rows of a table, whose gradients reach the weights behind it."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, positions: Tensor, recurrence: Recurrence, *weights: Tensor) -> Tensor:
        """table [M,E] float32, positions [B,S] int64, -1 read as 0, to [B,S,E]."""
        ctx.recurrence = recurrence
        ctx.save_for_backward(positions, *weights)
        return torch.nn.functional.embedding(positions.clamp(min=0), table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Any, ...]:
        """Through the recurrence up to the last of the positions, in float64."""
        positions, *weights = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [weight.detach().to(torch.float64).requires_grad_() for weight in weights]
            rows = ctx.recurrence(leaves, int(positions.max().clamp(min=0)) + 1)
            found = torch.autograd.grad(torch.nn.functional.embedding(positions.clamp(min=0), rows), leaves, gradient.to(torch.float64), allow_unused=True)
        pairs = zip(found, weights, strict=True)
        return None, None, None, *(torch.zeros_like(weight) if one is None else one.to(weight.dtype) for one, weight in pairs)
