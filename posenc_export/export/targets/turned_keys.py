"""Lowering of ops.turned_keys.attend to standard operators: keys are rotated further only in calls with a query that needs it."""

from typing import Optional, Sequence

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import standard
from posenc_export.export.targets.rewriter import Rewriter, number, size

POSITIONS, KEY_POSITIONS, FIRST, SECOND = 6, 7, 8, 9  # inputs of the node
DOUBLE, FLOAT = {"to": int(ir.DataType.DOUBLE)}, {"to": int(ir.DataType.FLOAT)}


def attend(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Attend with the keys as they are if no query of the call needs them turned."""
    return rewriter.choose(any_turns(rewriter, node), lambda: [_attend_turned(rewriter, node)], lambda: [standard.attend(rewriter, node)])[0]


def any_turns(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Return whether keys are turned for a query of the call, bool []."""
    last = rewriter.emit("ReduceMax", [node.inputs[POSITIONS]], attributes={"keepdims": 0})
    return rewriter.emit("GreaterOrEqual", [last, rewriter.constant(number(node, "first_turned"))])


def _attend_turned(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Attend with all keys turned for each query: [B,S,H*D]."""
    q, keys, values, mask = node.inputs[:4]
    scores = products(rewriter, node, q, keys, angles(rewriter, node))
    scaled = rewriter.emit("Mul", [scores, rewriter.constant(node.attributes["scale"].value, "float32")])
    masked = rewriter.emit("Add", [scaled, standard.in_float(rewriter, mask)])
    shares = rewriter.emit("Softmax", [rewriter.emit("Clip", [masked, rewriter.constant(standard.LEAST, "float32")])], attributes={"axis": -1})
    return standard.mix_of(rewriter, node, shares, values)


def drift_of(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Return by how many turns per position a key turns further for each query: [B,S,r/2] float64, for a node with exact angles."""
    leading, rest = (rows_of(node.inputs[index]) for index in (FIRST, SECOND))
    kept = min(number(node, "first_turned"), len(leading)) - 1  # the last row without a turn

    def turns() -> np.ndarray:
        frequencies = leading[kept:].astype(np.float64) + rest[kept:]
        return np.asarray((frequencies - frequencies[0]) / (2 * np.pi))

    table = rewriter.weight(f"{node.inputs[FIRST].name}.turns", turns)  # type: ignore[union-attr]
    behind = rewriter.emit("Sub", [node.inputs[POSITIONS], rewriter.constant(kept)])
    return rewriter.emit("Gather", [table, rewriter.emit("Max", [behind, rewriter.constant(0)])])


def rows_of(table: Optional[ir.Value]) -> np.ndarray:
    """Return the rows of a constant table."""
    assert table is not None and table.const_value is not None
    return table.const_value.numpy()


def in_radians(rewriter: Rewriter, turns: ir.Value) -> ir.Value:
    """Convert turns of any size, float64, to angles within one turn, float32."""
    part = rewriter.emit("Cast", [rewriter.emit("Sub", [turns, rewriter.emit("Floor", [turns])])], attributes=FLOAT)
    return rewriter.emit("Mul", [part, rewriter.constant(2 * np.pi, "float32")])


def is_exact(node: ir.Node) -> bool:
    """Return whether angles are proportional to distances: no product is rounded to float32."""
    return len(node.inputs) > SECOND and node.inputs[SECOND] is not None


def angles(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Return the angles of all keys for all queries [B,1,S,T,r/2] float32."""
    if not is_exact(node):
        return _rounded_angles(rewriter, node)
    queries = rewriter.emit("Unsqueeze", [node.inputs[POSITIONS], rewriter.constant([1, 3, 4])])
    keys = rewriter.emit("Unsqueeze", [node.inputs[KEY_POSITIONS], rewriter.constant([1, 2, 4])])
    distances = rewriter.emit("Cast", [rewriter.emit("Sub", [keys, queries])], attributes=DOUBLE)
    return in_radians(rewriter, rewriter.emit("Mul", [distances, rewriter.emit("Unsqueeze", [drift_of(rewriter, node), rewriter.constant([1, 3])])]))


def _rounded_angles(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """As `angles`, from products of positions and frequencies that are rounded to float32."""
    rows = rewriter.emit("Max", [node.inputs[POSITIONS], rewriter.constant(0)])
    own = rewriter.emit("Unsqueeze", [rewriter.emit("Gather", [node.inputs[FIRST], rows]), rewriter.constant([1, 3])])
    kept = rewriter.constant(rows_of(node.inputs[FIRST])[0], "float32")

    def drift(positions: Optional[ir.Value], axes: Sequence[int]) -> ir.Value:
        places = rewriter.emit("Cast", [rewriter.emit("Unsqueeze", [positions, rewriter.constant(axes)])], attributes=FLOAT)
        return rewriter.emit("Sub", [rewriter.emit("Cast", [rewriter.emit("Mul", [places, of])], attributes=DOUBLE) for of in (own, kept)])

    radians = rewriter.emit("Sub", [drift(node.inputs[KEY_POSITIONS], [1, 2, 4]), drift(node.inputs[POSITIONS], [1, 3, 4])])
    return in_radians(rewriter, rewriter.emit("Mul", [radians, rewriter.constant(0.5 / np.pi, "float64")]))


def products(rewriter: Rewriter, node: ir.Node, q: Optional[ir.Value], keys: Optional[ir.Value], angles: ir.Value) -> ir.Value:
    """Rotate keys [B,K,T,D] by angles [B,1,S,T,r/2] for each query, as a batch [B*S,K,T,D] of RotaryEmbedding, and multiply them with that query: [B,H,S,T]."""
    heads, kv_heads, head_size, half = number(node, "heads"), number(node, "kv_heads"), size(q, 3), size(node.inputs[FIRST], 1)
    q, keys = standard.in_float(rewriter, q), standard.in_float(rewriter, keys)
    queries = rewriter.emit("Shape", [q], attributes={"start": 1, "end": 2})
    slots = rewriter.emit("Shape", [keys], attributes={"start": 2, "end": 3})
    one, rest = rewriter.constant([1]), rewriter.constant([-1])
    for_each = rewriter.emit("Concat", [one, queries, one, one, one], attributes={"axis": 0})
    repeated = rewriter.emit("Expand", [rewriter.emit("Unsqueeze", [keys, one]), for_each])
    batch = rewriter.emit("Concat", [rest, rewriter.constant([kv_heads]), slots, rewriter.constant([head_size])], attributes={"axis": 0})
    rows = rewriter.emit("Concat", [rest, slots, rewriter.constant([half])], attributes={"axis": 0})
    waves = [rewriter.emit("Reshape", [rewriter.emit(op, [angles]), rows]) for op in ("Cos", "Sin")]
    attributes = {"interleaved": number(node, "interleaved"), **({"rotary_embedding_dim": 2 * half, "num_heads": kv_heads} if 2 * half < head_size else {})}
    turned = rewriter.emit("RotaryEmbedding", [rewriter.emit("Reshape", [repeated, batch]), *waves], attributes=attributes)
    grouped = rewriter.emit("Reshape", [q, rewriter.constant([-1, kv_heads, heads // kv_heads, head_size])])
    y = rewriter.emit("MatMul", [grouped, rewriter.emit("Transpose", [turned], attributes={"perm": [0, 1, 3, 2]})])
    of_tokens = rewriter.emit("Shape", [q], attributes={"start": 0, "end": 2})
    by_token = rewriter.emit("Reshape", [y, rewriter.emit("Concat", [of_tokens, rewriter.constant([heads]), slots], attributes={"axis": 0})])
    return rewriter.emit("Transpose", [by_token], attributes={"perm": [0, 2, 1, 3]})
