"""Semantic operations that read tokens in order."""

from typing import List, Tuple

import torch
from torch import Tensor

from posenc_export.ops import graph
from posenc_export.ops.graph import emitting


def valid_first(positions: Tensor) -> Tuple[Tensor, Tensor]:
    """Return the target column [B,S] int64 of each token that moves valid tokens (positions
    [B,S] at least 0) to the front in order, and their number [B,1] int64.
    """
    valid = positions.ge(0).to(torch.int64)
    count = valid.sum(1, keepdim=True)
    return torch.where(valid.eq(1), valid.cumsum(1) - 1, count + (1 - valid).cumsum(1) - 1), count


def recur(
    x: Tensor,
    hidden: Tensor,
    count: Tensor,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    recurrent_bias: Tensor,
) -> Tuple[Tensor, Tensor]:
    """Run a GRU over the first `count` [B,1] tokens of x [B,S,E], starting from hidden [B,N].
    Return its outputs [B,S,N] and the last hidden vectors [B,N].

    Weights have the shapes and order (reset, update, new) of torch.nn.GRU: weight [3N,E], recurrent
    [3N,N], bias [3N], recurrent_bias [3N].
    """
    if not torch.jit.is_scripting() and emitting():
        shape, weights = [x.size(0), x.size(1), hidden.size(1)], (weight, recurrent)
        biases, width = (bias, recurrent_bias), hidden.size(1)
        y = graph.Recur.emit(x, shape, x, hidden, count, *weights, *biases, width)
        return y, graph.LastHidden.emit(hidden, hidden.shape, y)
    outputs: List[Tensor] = []
    for index in range(x.size(1)):
        following = torch.gru_cell(x[:, index], hidden, weight, recurrent, bias, recurrent_bias)
        hidden = torch.where(count > index, following, hidden)
        outputs.append(hidden)
    return torch.stack(outputs, dim=1), hidden
