"""Semantic operations that read tokens in order."""

import torch
from torch import Tensor

from posenc_export.ops import graph
from posenc_export.ops.graph import emitting


def valid_first(positions: Tensor) -> tuple[Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor]:
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
    outputs: list[Tensor] = []
    for index in range(x.size(1)):
        following = torch.gru_cell(x[:, index], hidden, weight, recurrent, bias, recurrent_bias)
        hidden = torch.where(count > index, following, hidden)
        outputs.append(hidden)
    return torch.stack(outputs, dim=1), hidden


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run S' = e^g S, S = S' + r k (v - S'^T k)^T, y = S^T q over the tokens of a call (Yang et al.
    2024, Gated DeltaNet, 3.1). Return y [B,S,H,V] and the last state. Without rates, tokens correct
    nothing: S = S' + k v^T (Dao and Gu 2024, Mamba-2, 3.2).

    q and k [B,S,K,D], v [B,S,H,V], logarithms of decays g, at most 0, of each head [B,S,H], or of
    each entry of its keys [B,S,H*D] (Kimi Team 2025, KDA, eq. 1), rates r [B,S,H], state [B,H,D,V],
    all float32. Each head of q and k serves H/K heads of v.
    """
    if not torch.jit.is_scripting() and emitting():
        y = graph.GatedDelta.emit(v, v.shape, q, k, v, decay, rate, state, k.size(2), v.size(2))
        return y, graph.LastHidden.emit(state, state.shape, y)
    heads = v.size(2) // k.size(2)
    # [B,H,S,D]
    q, k = (part.repeat_interleave(heads, dim=2).transpose(1, 2) for part in (q, k))
    # In float64, so that the difference of two long sums is exact in float32.
    by_head = decay.unflatten(2, [v.size(2), -1]).transpose(1, 2)  # [B,H,S,1 or D]
    sums = by_head.to(torch.float64).cumsum(2)
    passed = sums.to(q.dtype).exp()
    remaining = (sums[:, :, -1:] - sums).to(q.dtype).exp()
    written = v.transpose(1, 2)
    if rate is not None:
        # What a token writes depends on what earlier ones of the call write: a triangular system.
        rates = rate.transpose(1, 2).unsqueeze(3)
        written = torch.linalg.solve_triangular(
            _products(k, k, sums) * rates,
            rates * (written - (passed * k) @ state),
            upper=False,
            unitriangular=True,
        )
    y = (passed * q) @ state + _products(q, k, sums) @ written
    last = passed[:, :, -1:].transpose(2, 3) * state + (remaining * k).transpose(2, 3) @ written
    return y.transpose(1, 2), last


def running_total(
    x: Tensor, valid: Tensor, state: Tensor, kind: str, most: int
) -> tuple[Tensor, Tensor]:
    """Return the total of each of S tokens x [B,S,C] and all valid ones before it, and the state
    after them. Tokens with valid [B,S] False are left out.

    Args:
        state: [B,1,2,C], the total before the call, and 1 where tokens have passed; zeros at first.
        kind: "sum", "product", "logsumexp" or "max".
        most: largest number of tokens.
    """
    empty = {"sum": 0.0, "product": 1.0, "logsumexp": -1e30, "max": float("-inf")}[kind]
    nothing = x.new_full((), empty)
    before, passed = state[:, 0, :1], state[:, 0, 1:]
    new = torch.where(valid.unsqueeze(2), x, nothing)
    y = torch.cat((torch.where(passed.gt(0), before, nothing), new), 1)
    if kind == "sum":
        y = y.cumsum(1)
    else:
        y = y.clamp(min=empty) if kind == "logsumexp" else y  # differences of -inf are NaN
        for power in range(most.bit_length()):
            earlier = torch.nn.functional.pad(y, (0, 0, 1 << power, 0), value=empty)
            earlier = earlier[:, : y.shape[1]]
            if kind == "product":
                y = y * earlier
            elif kind == "max":
                y = torch.maximum(y, earlier)
            else:
                larger, smaller = torch.maximum(y, earlier), torch.minimum(y, earlier)
                y = larger + (smaller - larger).exp().log1p()
        y = torch.where(y > empty, y, float("-inf")) if kind == "logsumexp" else y
    passed = torch.maximum(passed, valid.any(1)[:, None, None].to(x.dtype))
    return y[:, 1:], torch.cat((y[:, -1:], passed), 1).unsqueeze(1)


def _products(left: Tensor, right: Tensor, sums: Tensor, block: int = 32) -> Tensor:
    """Return left_i . (e^(s_i - s_j) right_j) [B,H,S,S] for j <= i and 0 for others, from left and
    right [B,H,S,D] and sums s [B,H,S,1 or D], float64. No exponent is above 0.

    block: number of tokens C whose decays are compared pair by pair, if each entry has its own.
    """
    if sums.size(3) == 1:
        between = (sums - sums.transpose(2, 3)).tril().to(left.dtype)
        return (left @ right.transpose(2, 3)) * between.exp().tril()
    # Sizes follow from tensors: a program of torch.export has no arithmetic with numbers.
    index, inside = (torch.arange(n, device=left.device) for n in (left.size(2), block))
    number = torch.div(index, block, rounding_mode="floor")
    # There is one block more than needed, since torch.export would fix the size of a single one.
    first = torch.minimum(torch.cat((index, inside + index[-1:]))[::block], index[-1:])  # [N]
    tokens = torch.minimum(first.unsqueeze(1) + inside, index[-1:])  # [N,C]
    # Of keys before the block of a row: s_i - s_j by way of the block's first token.
    since = (sums - sums.index_select(2, number * block)).to(left.dtype).exp()
    until = sums.index_select(2, first).unsqueeze(3) - sums.unsqueeze(2)  # [B,H,N,S,D]
    columns = right.unsqueeze(2) * until.clamp(max=0.0).to(left.dtype).exp()
    before = (left * since)[:, :, tokens] @ columns.transpose(3, 4)  # [B,H,N,C,S]
    before = before[:, :, number, index % block]
    # Of keys in the same block: pair by pair.
    same = tokens.index_select(0, number)  # [S,C]
    between = (sums.unsqueeze(3) - sums[:, :, same]).clamp(max=0.0).to(left.dtype)
    within = (left.unsqueeze(3) * right[:, :, same] * between.exp()).sum(4)  # [B,H,S,C]
    within = within.index_select(3, index % block)  # [B,H,S,S]
    return torch.where(number.unsqueeze(1) > number, before, within).tril()
