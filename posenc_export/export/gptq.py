"""Rounding column by column: what one column loses, the columns behind it make good for (Frantar et al. 2022, GPTQ, algorithm 1)."""

from typing import NamedTuple

import torch
from torch import Tensor

DAMPING = 0.1  # of the mean moment, added to each: text that was not in the sample has other moments
COLUMNS = 128  # rounded before the columns behind them are changed


class Order(NamedTuple):
    """The order in which columns are rounded, and how a loss is shared among the columns behind.

    The squared error of an output with weights w + d is d' M d on average, M the second moments of its inputs. For columns that are still free, its minimum
    follows from the Cholesky factor of the inverse of M. Columns of large moments come first: they have the most columns behind them.

    Args:
        columns: [K] int64.
        factor: upper Cholesky factor of the inverse of the damped moments, in this order [K,K] float64.
    """

    columns: Tensor
    factor: Tensor


def order_of(moments: Tensor) -> Order:
    """The order for inputs x whose mean x x' is `moments` [K,K] float64."""
    sizes = moments.diagonal()
    damping = DAMPING * float(sizes.mean()) or 1.0  # inputs that are all 0 say nothing: each weight alone
    columns = sizes.argsort(descending=True, stable=True)
    damped = moments[columns][:, columns] + damping * torch.eye(len(columns), dtype=moments.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return Order(columns, torch.linalg.cholesky(inverse, upper=True))


def rounded(weight: Tensor, scales: Tensor, order: Order, least: int, most: int) -> Tensor:
    """A weight [N,K] float32 as code * scale, rounded one column after another.

    Args:
        scales: of each weight [N,K] float32.
        least, most: codes.
    """
    columns, factor = order
    left, steps = weight.double()[:, columns], scales.double()[:, columns]
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)
    codes = torch.empty_like(left)
    for first in range(0, left.size(1), COLUMNS):
        end = min(first + COLUMNS, left.size(1))
        lost = torch.empty_like(left[:, first:end])
        for column in range(first, end):
            codes[:, column] = (left[:, column] / steps[:, column]).round().clamp(least, most)
            error = (left[:, column] - codes[:, column] * steps[:, column]) / factor[column, column]
            left[:, column:end] -= error[:, None] * factor[column, column:end]
            lost[:, column - first] = error
        left[:, end:] -= lost @ factor[first:end, end:]
    return (codes[:, columns.argsort()] * scales.double()).float()
