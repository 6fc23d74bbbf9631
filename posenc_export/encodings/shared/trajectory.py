"""Position rows from a trained recurrence: read from a table, with gradients through the recurrence."""

from typing import Any, Callable, Sequence, Tuple

import torch
from torch import Tensor

MOST_STEPS = 1 << 22  # steps of a recurrence, which run one after the other; 20 to 100 us each
# A function of weights and n that returns the first n rows [n,E], differentiable.
Recurrence = Callable[[Sequence[Tensor], int], Tensor]


def check_steps(name: str, positions: int, substeps: int = 1) -> None:
    """Raise ValueError if a table of positions takes more than MOST_STEPS steps."""
    if positions * substeps > MOST_STEPS:
        given = f"{positions} positions" + (f" of {substeps} substeps" if substeps > 1 else "")
        raise ValueError(f"{name}: expected at most {MOST_STEPS} steps, which run one after the other, got {given}; choose fewer")


class Rows(torch.autograd.Function):
    """Look-up in a table, with gradients to the weights that the table was computed from."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, positions: Tensor, recurrence: Recurrence, *weights: Tensor) -> Tensor:
        """table [M,E] float32, positions [B,S] int64 (-1 is read as 0) to [B,S,E]."""
        ctx.recurrence = recurrence
        ctx.save_for_backward(positions, *weights)
        return torch.nn.functional.embedding(positions.clamp(min=0), table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Any, ...]:
        """Differentiate the recurrence up to the largest position, in float64."""
        positions, *weights = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [weight.detach().to(torch.float64).requires_grad_() for weight in weights]
            rows = ctx.recurrence(leaves, int(positions.max().clamp(min=0)) + 1)
            found = torch.autograd.grad(torch.nn.functional.embedding(positions.clamp(min=0), rows), leaves, gradient.to(torch.float64), allow_unused=True)
        pairs = zip(found, weights, strict=True)
        return None, None, None, *(torch.zeros_like(weight) if one is None else one.to(weight.dtype) for one, weight in pairs)
