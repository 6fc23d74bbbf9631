"""Rounding column by column: what one column loses, the columns behind it make good for (Frantar et al. 2022, GPTQ, algorithm 1)."""

from typing import Tuple

import torch
from torch import Tensor

DAMPING = 0.1  # of the mean moment, added to each: text that was not in the sample has other moments
COLUMNS = 128  # rounded before the columns behind them are changed


def rounded(weight: Tensor, scales: Tensor, moments: Tensor, least: int, most: int) -> Tensor:
    """A weight [N,K] float32 as code * scale: that of the nearest outputs among those which rounding one column after another finds.

    The squared error of an output with weights w + d is d' M d on average, M the second moments of its inputs. For columns that are still free, its minimum
    follows from the Cholesky factor of the inverse of M. Columns of large moments come first: they have the most columns behind them.

    Args:
        scales: of each weight [N,K] float32.
        moments: mean x x' of inputs x, [K,K] float64.
        least, most: codes.
    """
    factor, order = _factor(moments)
    left, steps = weight.double()[:, order], scales.double()[:, order]
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
    back = order.argsort()
    return (codes[:, back] * scales.double()).float()


def _factor(moments: Tensor) -> Tuple[Tensor, Tensor]:
    """Upper Cholesky factor of the inverse of damped moments [K,K], and the order of its columns [K]."""
    sizes = moments.diagonal()
    damping = DAMPING * float(sizes.mean()) or 1.0  # inputs that are all 0 say nothing: each weight alone
    order = sizes.argsort(descending=True, stable=True)
    damped = moments[order][:, order] + damping * torch.eye(len(order), dtype=moments.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True), order
