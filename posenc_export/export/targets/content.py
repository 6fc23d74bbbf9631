"""Lowerings of content scores: products, gathering, sums from each key on, by distance."""

import functools
from typing import Tuple

import onnx_ir as ir

from posenc_export.export.targets import standard
from posenc_export.export.targets.builder import DOUBLE, FLOAT, Builder, size
from posenc_export.ops import graph

# Keys of a block, for each query of a call: larger blocks rotate queries less often and copy more
# of the table.
BLOCK = 256


def products(op: Builder, node: graph.Products) -> ir.Value:
    """Products of queries [B,S,H,D] and grouped keys [B,K,T,D]: [B,H,S,T] float32."""
    return standard.products_of(op, node, node.q, node.keys)


def wave_products(op: Builder, node: graph.WaveProducts) -> ir.Value:
    """Gather rows once for all heads, which are rows of one product: [B,H,S,T]."""
    q, waves = node.q, node.waves
    rows = op.Unsqueeze(_rows(op, waves, node.k_positions), [1])
    x, y = _turned(op, node)
    as_rows = op.Reshape(op.Concat(x, y, axis=-1), [0, 1, -1, size(waves, 1)])
    products = op.MatMul(as_rows, op.Transpose(rows, perm=[0, 1, 3, 2]))
    return op.Reshape(products, [0, size(q, 1), -1, 0])


def _rows(op: Builder, waves: ir.Value, positions: ir.Value) -> ir.Value:
    return op.Gather(waves, op.Clip(positions, 0, size(waves, 0) - 1))


def _turned(op: Builder, node: graph.WaveProducts) -> Tuple[ir.Value, ir.Value]:
    """Return both halves of the queries, rotated by their positions: [B,H,S,E/2]."""
    own = op.Unsqueeze(_rows(op, node.waves, node.q_positions), [1])
    cos, sin = op.several(2, "Split", own, axis=-1, num_outputs=2)
    s, c = op.several(2, "Split", node.q, axis=-1, num_outputs=2)
    x = op.Add(op.Mul(s, sin), op.Mul(c, cos))
    return x, op.Sub(op.Mul(c, sin), op.Mul(s, cos))


def consecutive_wave_products(
    op: Builder, node: graph.WaveProducts, first: ir.Value, total: ir.Value
) -> ir.Value:
    """Multiply with the keys at positions first [B,1], first + 1, ..., of which there are total [],
    in blocks: [B,H,S,T].

    (x, y) times (cos((b + n) w), sin((b + n) w)) is (x cos(b w) + y sin(b w), y cos(b w) - x sin(b
    w)) times (cos(n w), sin(n w)). The first factor is computed for the first position b of each
    block, and all blocks share the second, the first rows of the table. Blocks grow with S, which
    bounds the memory for the first factors by that of T / BLOCK queries.
    """
    waves = node.waves
    zero = op.constant(0)
    queries = op.Squeeze(op.Shape(node.q, start=2, end=3))
    block = op.Min(op.Mul(queries, BLOCK), total)
    starts = op.Add(first, op.Range(zero, total, block))
    of_starts = op.Unsqueeze(_rows(op, waves, starts), [1, 2])
    cos, sin = op.several(2, "Split", of_starts, axis=-1, num_outputs=2)
    x, y = (op.Unsqueeze(part, [3]) for part in _turned(op, node))
    x_cos, x_sin, y_cos, y_sin = (op.Mul(part, wave) for part in (x, y) for wave in (cos, sin))
    rotated = op.Concat(op.Add(x_cos, y_sin), op.Sub(y_cos, x_sin), axis=-1)
    front = op.constant([0])
    shared = op.Slice(waves, front, op.Unsqueeze(block, front), front)
    products = op.MatMul(rotated, op.Transpose(shared, perm=[1, 0]))
    in_order = op.Reshape(products, [0, 0, 0, -1])
    return op.Slice(in_order, front, op.Unsqueeze(total, front), [3])


def layers_of_ratio(op: Builder, node: graph.LayersOfRatio) -> ir.Value:
    """Both layers are products of a matrix with a row for each query and key: [B,H,S,T]."""
    x = op.Div(node.numbers, op.Unsqueeze(node.divisors, [1, 3]))
    rows = op.Reshape(x, [-1, 1])
    inner = op.Relu(op.Gemm(rows, node.first, node.first_bias, transB=1))
    y = op.Gemm(inner, node.second, node.second_bias, transB=1)
    leading = [op.Shape(x, start=0, end=1), op.Shape(x, start=2, end=4)]
    by_key = op.Reshape(y, op.Concat(*leading, [size(node.second, 0)], axis=0))
    return op.Transpose(by_key, perm=[0, 3, 1, 2])


def pick(op: Builder, node: graph.Pick) -> ir.Value:
    """Entries of rows of queries, and of keys times a factor: [B,H,S,T], as ops.pick."""
    terms = []
    if node.rows is not None:
        index = _for_every_head(op, node.index, node.rows)
        terms.append(op.GatherElements(node.rows, index, axis=-1))
    if node.key_rows is not None:
        by_key = op.Transpose(node.index, perm=[0, 1, 3, 2])
        index = _for_every_head(op, by_key, node.key_rows)
        of_keys = op.GatherElements(node.key_rows, index, axis=-1)
        by_query = op.Transpose(of_keys, perm=[0, 1, 3, 2])
        terms.append(op.Mul(by_query, op.constant(node.factor, "float32")))
    return functools.reduce(op.Add, terms)


def _for_every_head(op: Builder, index: ir.Value, like: ir.Value) -> ir.Value:
    """Expand index [B,1 or H,S,T] to [B,H,S,T], with H taken from like."""
    known = like.shape is not None and isinstance(like.shape[1], int)
    heads = op.constant([size(like, 1)]) if known else op.Shape(like, start=1, end=2)
    return op.Expand(index, op.Concat(op.constant([1]), heads, [1, 1], axis=0))


def sums_between(op: Builder, node: graph.SumsBetween) -> ir.Value:
    """The sum after each key less the sum after the query, in float64, as ops.sums_between."""
    numbers = op.Squeeze(op.Cast(node.numbers, to=DOUBLE), [3])
    is_after = op.Cast(op.Greater(node.distances, op.constant(0, "float32")), to=DOUBLE)
    after = op.MatMul(numbers, op.Transpose(op.Squeeze(is_after, [1]), perm=[0, 2, 1]))
    sums = op.CumSum(op.Unsqueeze(numbers, [2]), -1, reverse=1, exclusive=1)
    return op.Cast(op.Sub(sums, op.Unsqueeze(after, [3])), to=FLOAT)


def suffix_sum(op: Builder, node: graph.SuffixSum) -> ir.Value:
    return op.CumSum(node.x, -1, reverse=1, exclusive=int(not node.own))


def collect_by_distance(op: Builder, node: graph.CollectByDistance) -> ir.Value:
    """Add the weight of each key to the sum at its clipped distance: [B,H,S,left+right+1]."""
    weights, left, right = node.weights, node.left, node.right
    queries = op.Unsqueeze(node.positions, [1, 3])
    distances = op.Sub(op.Unsqueeze(node.key_positions, [1, 2]), queries)
    index = op.Add(op.Clip(distances, -left, right), left)
    leading = op.Slice(op.Shape(weights), [0], [3])
    shape = op.Concat(leading, [left + right + 1], axis=0)
    zeros = op.Expand(op.constant(0, "float32"), shape)
    index = _for_every_head(op, index, weights)
    return op.ScatterElements(zeros, index, weights, axis=-1, reduction="add")
