"""Target `ort`: ops.turned_keys.attend in compact rows, by GroupQueryAttention.

As long as no query of a call needs the keys turned, the operator computes the scores. Otherwise they are computed before it and given to it as a bias, with queries of
zeros: it then adds up the values and writes both caches in place.
"""

import dataclasses
from typing import Optional, Sequence, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.formats import Codes
from posenc_export.export.targets import ort_slots, ort_turned_key_blocks, turned_keys
from posenc_export.export.targets.group_query import GroupQuery, padded, rotated
from posenc_export.export.targets.ort_turned_key_blocks import Turned
from posenc_export.export.targets.rewriter import Rewriter, constant_of, number, numbers_of, producer, size, transposed
from posenc_export.ops import nodes


def attend(call: GroupQuery, node: ir.Node, append_key: ir.Node) -> Tuple[ir.Value, ...]:
    """Return output [B,S,H*D], keys and values."""
    rewriter, past = call.rewriter, append_key.inputs[0]
    exact = turned_keys.is_exact(node)
    q, new = (side_by_side(rewriter, value) if exact else value for value in (node.inputs[0], append_key.inputs[1]))

    def as_they_are() -> Sequence[ir.Value]:
        return call.emit(q, new, past)

    def beyond() -> Sequence[ir.Value]:
        slots = ort_slots.cache_position(rewriter) if call.rotation(q, new) else None
        query, key = (padded(rewriter, rotated(rewriter, value, slots), call.wide) for value in (q, new))
        assert query is not None and key is not None
        scaled = _like(query, rewriter.emit("Mul", [query, rewriter.constant(node.attributes["scale"].value, "float32")]))
        of_call = Turned(rewriter, scaled, key, past, *ort_slots.written(rewriter, append_key), 2 * size(node.inputs[turned_keys.FIRST], 1))
        if exact:
            scores = ort_turned_key_blocks.scores(of_call, turned_keys.drift_of(rewriter, node))
        else:
            scores = turned_keys.products(rewriter, node, scaled, of_call.from_slot(rewriter.constant([0])), turned_keys.angles(rewriter, node))
        zeros = rewriter.unpacked(rewriter.emit("ConstantOfShape", [rewriter.emit("Shape", [rewriter.packed(query)])]), number(node, "heads"))
        return dataclasses.replace(call, bias=scores).emit(_like(query, zeros), key, past)

    return rewriter.choose(turned_keys.any_turns(rewriter, node), beyond, as_they_are)


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
    packed, alone = rewriter.packed(x), len(x.uses()) == 1 and len(node.outputs[0].uses()) == 1
    weight_moved = alone and _move_columns(rewriter, packed, entries.reshape(-1))
    taken = packed if weight_moved else rewriter.emit("Gather", [packed, rewriter.constant(entries.reshape(-1))], attributes={"axis": 2})
    moved = _like(x, rewriter.unpacked(taken, heads))
    attributes = {"interleaved": 1.0, "linear": float(number(node, "linear"))}
    return _like(x, rewriter.emit("Rotate", [moved, positions, cos, sin], nodes.DOMAIN, attributes))


def _move_columns(rewriter: Rewriter, packed: ir.Value, entries: np.ndarray) -> bool:
    """Move the columns of a constant so that its product [B,S,N*D], or a part of the product, gets other entries in its last axis; return False if there is none."""
    start, product = _product_of(packed)
    if product is None or len(packed.uses()) > 1 or len(product.outputs[0].uses()) > 1:
        return False
    made = _moved(rewriter, product.inputs[1], start, entries)
    if made is not None:
        product.replace_input_with(1, made)
    return made is not None


def _moved(rewriter: Rewriter, weight: Optional[ir.Value], start: int, entries: np.ndarray) -> Optional[ir.Value]:
    """Return the right operand [K,N] of a product with other columns from `start` on, or None if it is not a constant."""
    name, found = rewriter.rounded(transposed(weight))
    source = weight if found is None else constant_of(transposed(weight))
    if source is None or source.const_value is None:
        return None
    given, axis = numbers_of(source), 1 if found is None else 0
    columns = np.arange(given.shape[axis])
    columns[start : start + len(entries)] = start + entries
    made = rewriter.weight(f"{source.name}.moved_{start}", lambda: np.ascontiguousarray(given.take(columns, axis)))
    if found is None:
        return made
    grid, codes = found
    marked = rewriter.mark(made, f"{name}.moved_{start}", (grid, Codes(codes.codes[columns], codes.scales[columns], codes.inputs)))
    return rewriter.emit("Transpose", [marked], attributes={"perm": [1, 0]})


def _product_of(packed: ir.Value) -> Tuple[int, Optional[ir.Node]]:
    """Return the MatMul node that computes a value, or of which it is a part, and its first column there; None if there is none."""
    node, start = packed.producer(), 0
    if node is not None and node.op_type == "Split" and node.inputs[0] is not None:
        start = int(turned_keys.rows_of(node.inputs[1])[: list(node.outputs).index(packed)].sum())
        node = node.inputs[0].producer()
    return start, node if node is not None and node.op_type == "MatMul" else None


def _like(x: ir.Value, made: ir.Value) -> ir.Value:
    """Give a value shape and dtype of another one, and return it."""
    made.shape, made.type = x.shape, x.type
    return made
