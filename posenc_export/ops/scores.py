"""Semantic operations for terms of scores: by distance, by position, and by counted keys."""

import torch
from torch import Tensor, library

from posenc_export.ops import graph
from posenc_export.ops.attention import products
from posenc_export.ops.graph import emitting


def distances(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Key [B,T] minus query positions [B,S] int64: [B,1,S,T] float32, undefined at padding."""
    if not torch.jit.is_scripting() and emitting():
        shape = [q_positions.size(0), 1, q_positions.size(1), k_positions.size(1)]
        like = torch.empty(0, dtype=torch.float32)
        return graph.Distances.emit(like, shape, q_positions, k_positions)
    return (k_positions[:, None, None] - q_positions[:, None, :, None]).to(torch.float32)


def wave_products(q: Tensor, q_positions: Tensor, k_positions: Tensor, waves: Tensor) -> Tensor:
    """Multiply q [B,H,S,E] with sines and cosines of distances: sum_k q_k sin(d w_k) +
    q_(k+E/2) cos(d w_k) with d = i - j, i from q_positions [B,S] int64 and j from k_positions
    [B,T]: [B,H,S,T]. waves [M,E] float32 has rows cos(p w), sin(p w); positions outside the table
    give arbitrary numbers.

    By the addition theorems, this is q, rotated by i, times the row of waves at j.
    """
    if not torch.jit.is_scripting() and emitting():
        shape = [*q.shape[:3], k_positions.size(1)]
        return graph.WaveProducts.emit(q, shape, q, q_positions, k_positions, waves)
    last = waves.size(0) - 1
    own = torch.nn.functional.embedding(q_positions.clamp(0, last), waves).unsqueeze(1)
    cos, sin = own.split(waves.size(1) // 2, dim=-1)
    s, c = q.split(waves.size(1) // 2, dim=-1)
    turned = torch.cat((s * sin + c * cos, c * sin - s * cos), dim=-1)
    rows = torch.nn.functional.embedding(k_positions.clamp(0, last), waves)
    return (turned.flatten(1, 2) @ rows.transpose(1, 2)).unflatten(1, [q.size(1), q.size(2)])


def layers_of_ratio(
    numbers: Tensor,
    divisors: Tensor,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
) -> Tensor:
    """Compute numbers [B,1,S,T] over divisors [B,S], and for each quotient x the vector second
    relu(first x + first_bias) + second_bias, all float32: [B,H,S,T]. first [n,1], second [H,n].
    """
    if not torch.jit.is_scripting() and emitting():
        shape = [numbers.size(0), second.size(0), *numbers.shape[2:]]
        inputs = (numbers, divisors, first, first_bias, second, second_bias)
        return graph.LayersOfRatio.emit(numbers, shape, *inputs)
    x = numbers.squeeze(1) / divisors.unsqueeze(2)
    inner = torch.relu(torch.nn.functional.linear(x.unsqueeze(3), first, first_bias))
    return torch.nn.functional.linear(inner, second, second_bias).permute(0, 3, 1, 2)


def pick(
    rows: Tensor | None, index: Tensor, key_rows: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """Gather entries index [B,1 or H,S,T] int64 of the last axis of rows [B,H,S,R] of queries, and
    add `factor` times those of key_rows [B,H,T,R] of keys: [B,H,S,T]. Either rows may be absent.
    """
    like = rows if rows is not None else key_rows
    assert like is not None
    if not torch.jit.is_scripting() and emitting():
        shape = [like.size(0), like.size(1), index.size(2), index.size(3)]
        return graph.Pick.emit(like, shape, rows, index, key_rows, factor)
    index = index.expand(-1, like.size(1), -1, -1)
    if key_rows is None:
        return like.gather(-1, index)
    of_keys = factor * key_rows.gather(-1, index.transpose(2, 3)).transpose(2, 3)
    return of_keys if rows is None else rows.gather(-1, index) + of_keys


def collect_by_distance(
    weights: Tensor, positions: Tensor, key_positions: Tensor, left: int, right: int
) -> Tensor:
    """Sum weights [B,H,S,T] by distance, key_positions [B,T] minus positions [B,S] int64, clipped
    to -left .. right: [B,H,S,left+right+1].
    """
    if not torch.jit.is_scripting() and emitting():
        shape = [*weights.shape[:3], left + right + 1]
        inputs = (weights, positions, key_positions)
        return graph.CollectByDistance.emit(weights, shape, *inputs, left, right)
    index = (key_positions.unsqueeze(1) - positions.unsqueeze(2)).clamp(-left, right) + left
    index = index.unsqueeze(1).expand(-1, weights.size(1), -1, -1)  # [B,H,S,T]
    sums = torch.zeros_like(weights[..., :1]).expand(-1, -1, -1, left + right + 1)
    return sums.scatter_add(-1, index, weights)


def suffix_sum(x: Tensor, own: bool = True) -> Tensor:
    """Sum what follows each entry of the last axis, with the entry if `own`, from the end."""
    if not torch.jit.is_scripting() and emitting():
        return graph.SuffixSum.emit(x, x.shape, x, own)
    sums = x.flip(-1).cumsum(-1).flip(-1)
    return sums if own else sums - x


library.define("posenc_scores::suffix_sum", "(Tensor x, bool own=True) -> Tensor")
library.impl("posenc_scores::suffix_sum", "CompositeExplicitAutograd", suffix_sum)
SUFFIX_SUM = torch.ops.posenc_scores.suffix_sum.default  # as one operator of a trace


@library.register_fake("posenc_scores::suffix_sum")
def _(x: Tensor, own: bool = True) -> Tensor:
    return torch.empty_like(x)


def sums_between(numbers: Tensor, distances: Tensor) -> Tensor:
    """Sum numbers [B,N,T,1] of the keys after each key up to the query, by their distances
    [B,1,S,T]: [B,N,S,T] float32. Computed in float64, so that the difference of two long sums is
    exact in float32.
    """
    if not torch.jit.is_scripting() and emitting():
        shape = [numbers.size(0), numbers.size(1), distances.size(2), distances.size(3)]
        return graph.SumsBetween.emit(distances, shape, numbers, distances)
    wide = numbers.to(torch.float64).squeeze(3)
    after = distances.gt(0).to(torch.float64).squeeze(1).transpose(1, 2)  # [B,T,S]
    # The sum after the key less the sum after the query.
    between = suffix_sum(wide.unsqueeze(2), False) - (wide @ after).unsqueeze(3)
    return between.to(torch.float32)


def rows_at_counts(q: Tensor, keys: Tensor, mask: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Interpolate rows [B,H,S,R] at the count of each key, which is the sum of sigmoid(scale q k)
    over this and all later visible keys, at most R - 1: [B,H,S,T] float32. q [B,S,H,D], keys
    [B,K,T,D], mask [B,1 or H,S,T].
    """
    if not torch.jit.is_scripting() and emitting():
        shape, sizes = [*rows.shape[:3], keys.size(2)], (q.size(2), keys.size(1))
        return graph.RowsAtCounts.emit(rows, shape, q, keys, mask, rows, *sizes, scale)
    gates = torch.sigmoid(products(scale * q.to(torch.float32), keys)) * mask.gt(-1e30).to(
        torch.float32
    )
    # Kernels add float32 numbers in different orders; in float64 they agree on the row below a
    # count and on the fraction above it.
    counts = suffix_sum(gates.to(torch.float64)).clamp(0.0, rows.size(3) - 1.0)
    below = counts.floor()
    # Clamped as integers: NaN gives no valid index, and an index out of range would fail the whole
    # batch.
    index = below.to(torch.int64).clamp(0, rows.size(3) - 1)
    steps = rows.diff(dim=3, append=rows[..., -1:])
    return pick(rows, index) + (counts - below).to(torch.float32) * pick(steps, index)
