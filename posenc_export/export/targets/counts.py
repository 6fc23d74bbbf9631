"""Lowerings of ops.rows_at_counts: over all keys; over the last keys of caches of `ort`."""

import onnx_ir as ir

from posenc_export.export.targets import standard
from posenc_export.export.targets.builder import DOUBLE, FLOAT, INT64, Builder, size
from posenc_export.ops.graph import Append, RowsAtCounts

# Keys that are counted first, for each row of the table: enough for gates of 1/4 on average.
KEYS_PER_ROW = 4


def rows_at_counts(op: Builder, node: RowsAtCounts) -> ir.Value:
    """Read rows [B,H,S,R] at the counts of all keys: [B,H,S,T]."""
    return _rows_at(op, _gates(op, node, node.keys, node.mask), node.rows)


def rows_at_last_counts(
    op: Builder,
    node: RowsAtCounts,
    append: Append,
    first: ir.Value,
    total: ir.Value,
) -> ir.Value:
    """Read rows [B,H,S,R] at the counts of the keys that `append` caches, without counting all of
    them: [B,H,S,T].

    Counts grow from the last key to the first and are at most R - 1. If the gates of the last keys
    add up to R for every query, the counts of all earlier keys are R - 1. Otherwise all keys are
    counted.

    Args:
        first: slot of the first new token of each row [B].
        total: number of slots T, [1].
    """
    mask, rows, count = node.mask, node.rows, size(node.rows, 3)
    before = op.Sub(op.ReduceMin(first), [KEYS_PER_ROW * count])
    recent = op.Max(before, [0])
    # `append` writes new keys in place, before or after this reads the cache: both give the same
    # keys.
    update = op.Transpose(append.new, perm=[0, 2, 1, 3])
    last_keys = op.TensorScatter(
        _slots(op, append, recent, total), update, op.Sub(first, recent), axis=2
    )
    last = _gates(op, node, last_keys, _columns(op, mask, recent, total))
    least = op.ReduceMin(op.ReduceSum(last, [-1]), keepdims=0)
    # The sum is rounded, so that a sum of R - 1 would not be enough.
    start = op.Where(op.GreaterOrEqual(least, op.constant(count, "float32")), recent, [0])
    keys = _slots(op, append, start, recent)
    earlier = _gates(op, node, keys, _columns(op, mask, start, recent))
    counted = _rows_at(op, op.Concat(earlier, last, axis=3), rows)
    largest = _columns(op, rows, op.constant([count - 1]), op.constant([count]))
    uncounted = op.Expand(largest, op.Concat([1, 1, 1], start, axis=0))
    return op.Concat(uncounted, counted, axis=3)


def _slots(op: Builder, append: Append, start: ir.Value, end: ir.Value) -> ir.Value:
    """Keys [B,K,end-start,D] of a cache, whose heads may be wider than those of new keys."""
    ends = op.Concat(end, [size(append.new, 3)], axis=0)
    return op.Slice(append.past, op.Concat(start, [0], axis=0), ends, [2, 3])


def _columns(op: Builder, x: ir.Value, start: ir.Value, end: ir.Value) -> ir.Value:
    """Columns start .. end - 1 of x [B,N,S,T]."""
    return op.Slice(x, start, end, [3])


def _gates(op: Builder, node: RowsAtCounts, keys: ir.Value, mask: ir.Value) -> ir.Value:
    """Gates sigmoid(scale q k) [B,H,S,T] float32 of visible keys, 0 for others."""
    # CUDA compares no bfloat16
    visible = op.Greater(standard.in_float(op, mask), op.constant(standard.LEAST, "float32"))
    queries = op.Shape(node.q, start=1, end=2)
    q = op.Mul(standard.in_float(op, node.q), op.constant(node.scale, "float32"))
    gates = op.Sigmoid(standard.products_of(op, node, q, keys, queries))
    return op.Mul(gates, op.Cast(visible, to=FLOAT))


def _rows_at(op: Builder, gates: ir.Value, rows: ir.Value) -> ir.Value:
    """Interpolate rows [B,H,S,R] at the sums of gates [B,H,S,T] from each key on: [B,H,S,T]."""
    last = size(rows, 3) - 1
    sums = op.CumSum(op.Cast(gates, to=DOUBLE), -1, reverse=1)
    counts = op.Clip(sums, op.constant(0, "float64"), op.constant(last, "float64"))
    below = op.Floor(counts)
    whole = op.Cast(below, to=INT64)
    index = op.Clip(whole, 0, last)
    following = op.Gather(rows, [*range(1, last + 1), last], axis=3)
    steps = op.Sub(following, rows)
    lower, step = (op.GatherElements(values, index, axis=-1) for values in (rows, steps))
    part = op.Cast(op.Sub(counts, below), to=FLOAT)
    return op.Add(lower, op.Mul(part, step))
