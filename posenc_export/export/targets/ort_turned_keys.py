"""Target `ort`: ops.turned_keys.attend in compact rows, by GroupQueryAttention.

As long as no query of a call needs the keys turned, the operator computes the scores. Otherwise they are computed before it and given to it as a bias, with queries of
zeros: it then adds up the values and writes both caches in place.
"""

import dataclasses
from typing import Sequence, Tuple

import onnx_ir as ir

from posenc_export.export.targets import ort_slots, turned_keys
from posenc_export.export.targets.group_query import GroupQuery, padded, rotated
from posenc_export.export.targets.rewriter import Builder
from posenc_export.ops.graph import Append, AttendTurnedKeys


def attend(op: Builder, call: GroupQuery, node: AttendTurnedKeys, key: Append) -> Tuple[ir.Value, ...]:
    """Return output [B,S,H*D], keys and values."""

    def within(op: Builder) -> Sequence[ir.Value]:
        return call.emit(op, node.q, key.new, key.past)

    def beyond(op: Builder) -> Sequence[ir.Value]:
        slots = ort_slots.cache_position(op) if call.rotation(node.q, key.new) else None
        q, new = (padded(op, rotated(op, value, slots), call.wide) for value in (node.q, key.new))
        scaled = _like(q, op.Mul(q, op.constant(node.scale, "float32")))
        first, total = ort_slots.written(op, key)
        cached = op.Slice(key.past, [0], total, [2])
        keys = op.TensorScatter(cached, op.Transpose(new, perm=[0, 2, 1, 3]), first, axis=2)  # a copy: GroupQueryAttention writes the cache later
        scores = turned_keys.products(op, node, scaled, keys, turned_keys.angles(op, node))
        zeros = op.split_heads(op.ConstantOfShape(op.Shape(op.merge_heads(q))), node.heads)
        return dataclasses.replace(call, bias=scores).emit(op, _like(q, zeros), new, key.past)

    return op.choose(turned_keys.any_turns(op, node), beyond, within)


def _like(x: ir.Value, value: ir.Value) -> ir.Value:
    """Give a value shape and dtype of another one, and return it."""
    value.shape, value.type = x.shape, x.type
    return value
