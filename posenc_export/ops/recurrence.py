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


def short_convolution(x: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
    """silu(sum_m w_m x_(t-m)) of each channel, m = 0 .. n - 1, after the last inputs of earlier
    calls: x [B,S,C], tail [B,n-1,C], weight [C,1,n], w_m at n - 1 - m, float32, to [B,S,C].
    """
    if not torch.jit.is_scripting() and emitting():
        return graph.ShortConvolution.emit(x, x.shape, x, tail, weight)
    tokens, y = torch.cat((tail, x), dim=1), torch.zeros_like(x)
    for tap in range(weight.size(2)):
        y = y + tokens.narrow(1, tap, x.size(1)) * weight[:, 0, tap]
    return torch.nn.functional.silu(y)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> Tuple[Tensor, Tensor]:
    """Run S' = e^g S, S = S' + r k (v - S'^T k)^T, y = S^T q over the tokens of a call (Yang et al.
    2024, Gated DeltaNet, 3.1). Return y [B,S,H,V] and the last state.

    q and k [B,S,K,D], v [B,S,H,V], logarithms of decays g and rates r [B,S,H], state [B,H,D,V], all
    float32. Each head of q and k serves H/K heads of v.
    """
    if not torch.jit.is_scripting() and emitting():
        y = graph.GatedDelta.emit(v, v.shape, q, k, v, decay, rate, state, k.size(2), v.size(2))
        return y, graph.LastHidden.emit(state, state.shape, y)
    heads = v.size(2) // k.size(2)
    # [B,H,S,D]
    q, k = (part.repeat_interleave(heads, dim=2).transpose(1, 2) for part in (q, k))
    rates = rate.transpose(1, 2).unsqueeze(3)
    # In float64, so that the difference of two long sums is exact in float32.
    sums = decay.transpose(1, 2).to(torch.float64).cumsum(2)
    between = (sums.unsqueeze(3) - sums.unsqueeze(2)).tril().to(torch.float32)  # [B,H,S,S]
    between = between.exp().tril()
    passed = sums.to(torch.float32).exp().unsqueeze(3)
    remaining = (sums[:, :, -1:] - sums).to(torch.float32).exp().unsqueeze(3)
    # What a token writes depends on what the earlier ones of the call write: a triangular system.
    system = (k @ k.transpose(2, 3)) * between * rates
    written = torch.linalg.solve_triangular(
        system, rates * (v.transpose(1, 2) - passed * (k @ state)), upper=False, unitriangular=True
    )
    y = passed * (q @ state) + ((q @ k.transpose(2, 3)) * between) @ written
    last = passed[:, :, -1:] * state + (remaining * k).transpose(2, 3) @ written
    return y.transpose(1, 2), last
