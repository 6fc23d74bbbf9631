"""Target `ort`: turned.attend in compact rows, by GroupQueryAttention.

As long as no query of a call needs the keys turned, the operator computes the scores. Otherwise they are computed before it and given to it as a bias, with queries of
zeros: it then adds up the values and writes both caches in place.
"""

import dataclasses
from typing import Optional, Sequence, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export import semantic
from posenc_export.export.rewriter import Rewriter, number, producer, size
from posenc_export.export.targets import ort_slots, turned, turned_blocks
from posenc_export.export.targets.group_query import GroupQuery, padded, rotated
from posenc_export.export.targets.turned_blocks import Turned


def attend(call: GroupQuery, node: ir.Node, append_key: ir.Node) -> Tuple[ir.Value, ...]:
    """Return output [B,S,H*D], keys and values."""
    rewriter, past = call.rewriter, append_key.inputs[0]
    exact = turned.is_exact(node)
    q, new = (side_by_side(rewriter, value) if exact else value for value in (node.inputs[0], append_key.inputs[1]))

    def as_they_are() -> Sequence[ir.Value]:
        return call.emit(q, new, past)

    def beyond() -> Sequence[ir.Value]:
        slots = ort_slots.cache_position(rewriter) if call.rotation(q, new) else None
        query, key = (padded(rewriter, rotated(rewriter, value, slots), call.wide) for value in (q, new))
        assert query is not None and key is not None
        scaled = _like(query, rewriter.emit("Mul", [query, rewriter.constant(node.attributes["scale"].value, "float32")]))
        of_call = Turned(rewriter, scaled, key, past, *ort_slots.written(rewriter, append_key), 2 * size(node.inputs[turned.FIRST], 1))
        if exact:
            scores = turned_blocks.scores(of_call, turned.drift_of(rewriter, node))
        else:
            scores = turned.products(rewriter, node, scaled, of_call.from_slot(rewriter.constant([0])), turned.angles(rewriter, node))
        zeros = rewriter.unpacked(rewriter.emit("ConstantOfShape", [rewriter.emit("Shape", [rewriter.packed(query)])]), number(node, "heads"))
        return dataclasses.replace(call, bias=scores).emit(_like(query, zeros), key, past)

    return rewriter.choose(turned.any_turns(rewriter, node), beyond, as_they_are)


def side_by_side(rewriter: Rewriter, value: Optional[ir.Value]) -> Optional[ir.Value]:
    """Put the two entries of a pair next to each other in heads that a Rotate node produces, which leaves the products of queries and keys as they are."""
    node = producer(value, "Rotate")
    if node is None or number(node, "interleaved"):
        return value
    x, positions, cos, sin = node.inputs
    assert x is not None
    heads, head_size, rotary = size(x, 2), size(x, 3), 2 * size(cos, 1)
    pairs = np.arange(rotary).reshape(2, -1).T.reshape(-1)
    entries = np.concatenate((pairs, np.arange(rotary, head_size))) + head_size * np.arange(heads)[:, None]
    moved = rewriter.emit("Gather", [rewriter.packed(x), rewriter.constant(entries.reshape(-1))], attributes={"axis": 2})
    moved = _like(x, rewriter.unpacked(moved, heads))
    attributes = {"interleaved": 1.0, "linear": float(number(node, "linear"))}
    return _like(x, rewriter.emit("Rotate", [moved, positions, cos, sin], semantic.DOMAIN, attributes))


def _like(x: ir.Value, made: ir.Value) -> ir.Value:
    """Give a value shape and dtype of another one, and return it."""
    made.shape, made.type = x.shape, x.type
    return made
