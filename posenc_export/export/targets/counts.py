"""Lowerings of ops.rows_at_counts: one counts all keys; the other, for caches of target `ort`, counts only the last keys if all earlier ones have the largest count."""

from typing import Optional

import onnx_ir as ir

from posenc_export.export.targets import standard
from posenc_export.export.targets.rewriter import Rewriter, size

KEYS_PER_ROW = 4  # keys that are counted first, for each row of the table: enough for gates of 1/4 on average


def rows_at_counts(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Read rows [B,H,S,R] at the counts of all keys: [B,H,S,T]."""
    q, keys, mask, rows = node.inputs
    return _rows_at(rewriter, _gates(rewriter, node, keys, mask), rows)


def rows_at_last_counts(rewriter: Rewriter, node: ir.Node, append: ir.Node, first: ir.Value, total: ir.Value) -> ir.Value:
    """Read rows [B,H,S,R] at the counts of the keys that `append` caches, without counting all of them: [B,H,S,T].

    Counts grow from the last key to the first and are at most R - 1. If the gates of the last keys add up to R for every query, the counts of all earlier keys
    are R - 1. Otherwise all keys are counted.

    Args:
        first: slot of the first new token of each row [B].
        total: number of slots T, [1].
    """
    _, _, mask, rows = node.inputs
    past, new, _ = append.inputs
    count, axis = size(rows, 3), rewriter.constant([2])
    before = rewriter.emit("Sub", [rewriter.emit("ReduceMin", [first]), rewriter.constant([KEYS_PER_ROW * count])])
    recent = rewriter.emit("Max", [before, rewriter.constant([0])])
    # `append` writes new keys in place, before or after this reads the cache: both give the same keys.
    update = rewriter.emit("Transpose", [new], attributes={"perm": [0, 2, 1, 3]})
    cached = rewriter.emit("Slice", [past, recent, total, axis])
    last_keys = rewriter.emit("TensorScatter", [cached, update, rewriter.emit("Sub", [first, recent])], attributes={"axis": 2})
    last = _gates(rewriter, node, last_keys, _columns(rewriter, mask, recent, total))
    least = rewriter.emit("ReduceMin", [rewriter.emit("ReduceSum", [last, rewriter.constant([-1])])], attributes={"keepdims": 0})
    # The sum is rounded, so that a sum of R - 1 would not be enough.
    start = rewriter.emit("Where", [rewriter.emit("GreaterOrEqual", [least, rewriter.constant(count, "float32")]), recent, rewriter.constant([0])])
    earlier = _gates(rewriter, node, rewriter.emit("Slice", [past, start, recent, axis]), _columns(rewriter, mask, start, recent))
    counted = _rows_at(rewriter, rewriter.emit("Concat", [earlier, last], attributes={"axis": 3}), rows)
    largest = _columns(rewriter, rows, rewriter.constant([count - 1]), rewriter.constant([count]))
    uncounted = rewriter.emit("Expand", [largest, rewriter.emit("Concat", [rewriter.constant([1, 1, 1]), start], attributes={"axis": 0})])
    return rewriter.emit("Concat", [uncounted, counted], attributes={"axis": 3})


def _columns(rewriter: Rewriter, x: Optional[ir.Value], start: ir.Value, end: ir.Value) -> ir.Value:
    """Columns start .. end - 1 of x [B,N,S,T]."""
    return rewriter.emit("Slice", [x, start, end, rewriter.constant([3])])


def _gates(rewriter: Rewriter, node: ir.Node, keys: Optional[ir.Value], mask: Optional[ir.Value]) -> ir.Value:
    """Gates sigmoid(q k) [B,H,S,T] float32 of visible keys, 0 for others."""
    visible = rewriter.emit("GreaterOrEqual", [mask, rewriter.constant(0, rewriter.dtype)])
    queries = rewriter.emit("Shape", [node.inputs[0]], attributes={"start": 1, "end": 2})
    gates = rewriter.emit("Sigmoid", [standard.products_of(rewriter, node, node.inputs[0], keys, queries)])
    return rewriter.emit("Mul", [gates, rewriter.emit("Cast", [visible], attributes={"to": int(ir.DataType.FLOAT)})])


def _rows_at(rewriter: Rewriter, gates: ir.Value, rows: Optional[ir.Value]) -> ir.Value:
    """Interpolate rows [B,H,S,R] at the sums of gates [B,H,S,T] from each key on: [B,H,S,T]."""
    last, double = size(rows, 3) - 1, {"to": int(ir.DataType.DOUBLE)}
    sums = rewriter.emit("CumSum", [rewriter.emit("Cast", [gates], attributes=double), rewriter.constant(-1)], attributes={"reverse": 1})
    counts = rewriter.emit("Clip", [sums, rewriter.constant(0, "float64"), rewriter.constant(last, "float64")])
    below = rewriter.emit("Floor", [counts])
    whole = rewriter.emit("Cast", [below], attributes={"to": int(ir.DataType.INT64)})
    index = rewriter.emit("Clip", [whole, rewriter.constant(0), rewriter.constant(last)])
    following = rewriter.emit("Gather", [rows, rewriter.constant([*range(1, last + 1), last])], attributes={"axis": 3})
    steps = rewriter.emit("Sub", [following, rows])
    lower, step = (rewriter.emit("GatherElements", [values, index], attributes={"axis": -1}) for values in (rows, steps))
    part = rewriter.emit("Cast", [rewriter.emit("Sub", [counts, below])], attributes={"to": int(ir.DataType.FLOAT)})
    return rewriter.emit("Add", [lower, rewriter.emit("Mul", [part, step])])
