"""Target `ort`: turned.attend in compact rows, by GroupQueryAttention.

As long as no query of a call needs the keys turned, the operator computes the scores. Otherwise they are computed before it and given to it as a bias, with queries of
zeros: it then adds up the values and writes both caches in place.
"""

import dataclasses
from typing import Optional, Sequence, Tuple

import onnx_ir as ir

from posenc_export.export.rewriter import Rewriter, number
from posenc_export.export.targets import ort_slots, turned
from posenc_export.export.targets.group_query import GroupQuery, padded, rotated


def attend(call: GroupQuery, node: ir.Node, append_key: ir.Node) -> Tuple[ir.Value, ...]:
    """Return output [B,S,H*D], keys and values."""
    rewriter, q = call.rewriter, node.inputs[0]
    past, new, _ = append_key.inputs

    def as_they_are() -> Sequence[ir.Value]:
        return call.emit(q, new, past)

    def beyond() -> Sequence[ir.Value]:
        slots = ort_slots.cache_position(rewriter) if call.rotation(q, new) else None
        query, key = (padded(rewriter, rotated(rewriter, value, slots), call.wide) for value in (q, new))
        scores = rewriter.emit("Mul", [_products(rewriter, node, query, key, append_key), rewriter.constant(node.attributes["scale"].value, "float32")])
        return dataclasses.replace(call, bias=scores).emit(_zeros(rewriter, query, number(node, "heads")), key, past)

    return rewriter.choose(turned.any_turns(rewriter, node), beyond, as_they_are)


def _zeros(rewriter: Rewriter, query: Optional[ir.Value], heads: int) -> ir.Value:
    """Return zeros in the shape of queries [B,S,H,D]."""
    assert query is not None
    zeros = rewriter.unpacked(rewriter.emit("ConstantOfShape", [rewriter.emit("Shape", [rewriter.packed(query)])]), heads)
    zeros.shape = query.shape
    return zeros


def _products(rewriter: Rewriter, node: ir.Node, query: Optional[ir.Value], key: Optional[ir.Value], append_key: ir.Node) -> ir.Value:
    """Return the products [B,H,S,T] of queries [B,S,H,D] with all keys, cached ones and new ones [B,S,K,D], turned for each query."""
    first, total = ort_slots.written(rewriter, append_key)
    # GroupQueryAttention writes the new keys later.
    cached = rewriter.emit("Slice", [append_key.inputs[0], rewriter.constant([0]), total, rewriter.constant([2])])
    update = rewriter.emit("Transpose", [key], attributes={"perm": [0, 2, 1, 3]})
    keys = rewriter.emit("TensorScatter", [cached, update, first], attributes={"axis": 2})
    return turned.products(rewriter, node, query, keys, turned.angles(rewriter, node, node.inputs[turned.POSITIONS], node.inputs[turned.KEY_POSITIONS]))
