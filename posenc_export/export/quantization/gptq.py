"""Round a weight column by column and compensate the error of each column in those not rounded
yet (Frantar et al. 2022, GPTQ, algorithm 1).
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Added to the second moment of each input, relative to their mean, because the moments of other
# text differ.
DAMPING = 0.02
COLUMNS = 128  # columns that are rounded before the remaining columns are updated


class Order(NamedTuple):
    """Order of the columns, and the factor that distributes the error of a column among the
    remaining ones.

    The mean squared error of an output with weights w + d is d' M d, where M are the second moments
    of the inputs. The Cholesky factor of the inverse of M gives its minimum over the remaining
    columns. Columns with large moments are rounded first, because most columns can then still
    compensate their error.
    """

    columns: Tensor  # [K] int64
    # Upper Cholesky factor of the inverse of the damped moments, in this order [K,K] float32.
    factor: Tensor
    sizes: Tensor  # damped mean squares of the inputs [K] float64


def order_of(moments: Tensor) -> Order:
    """Return the order for inputs x with mean x x' = `moments` [K,K] float64."""
    sizes = moments.diagonal()
    # If all inputs are 0, weights are rounded independently.
    damping = DAMPING * float(sizes.mean()) or 1.0
    columns = sizes.argsort(descending=True, stable=True)
    damped = moments[columns][:, columns]
    damped.diagonal().add_(damping)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return Order(columns, torch.linalg.cholesky(inverse, upper=True).float(), sizes + damping)


def codes(
    weight: Tensor, scales: Tensor, zeros: Tensor, order: Order, least: int, most: int
) -> Tensor:
    """Return codes [N,K] float32, whole numbers, with which (code - zero) * scale replaces a weight
    [N,K] float32. scales, zeros: scale and zero point of each weight [N,K] float32; least, most:
    smallest and largest code.
    """
    columns, factor, _ = order
    # Transposed, so that a column is contiguous in memory.
    remaining, steps, zeros = (part.T[columns] for part in (weight, scales, zeros))
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)
    result = torch.empty_like(remaining)
    for first in range(0, len(remaining), COLUMNS):
        end = min(first + COLUMNS, len(remaining))
        lost = torch.empty_like(remaining[first:end])
        for column in range(first, end):
            step, zero, row = steps[column], zeros[column], factor[column]
            code = result[column]
            torch.div(remaining[column], step, out=code).round_().add_(zero).clamp_(least, most)
            error = lost[column - first]
            torch.sub(remaining[column], (code - zero).mul_(step), out=error).div_(row[column])
            # In place: -= on a part of a tensor would copy the part onto itself.
            remaining[column + 1 : end].sub_(error * row[column + 1 : end, None])
        remaining[end:].sub_((lost.T.contiguous() @ factor[first:end, end:]).T)
    return result[columns.argsort()].T
