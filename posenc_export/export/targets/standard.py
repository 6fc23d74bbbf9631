"""Lowerings to standard operators that the ONNX targets share: rotation, mask, attention and its separate steps."""

import functools
from typing import Dict, Optional, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import experts, two_rotations
from posenc_export.export.targets.rewriter import Rewriter, number, producer, size

NEVER = -np.inf
LEAST = -1e30  # lower bound of scores, as in ops.shares; a softmax over -inf only gives NaN


def rotate(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Rotate packed heads with RotaryEmbedding-23. Position -1 reads row 0; the result belongs to padding and is masked.

    With position_ids, the node refuses more columns than its tables have rows. Keys that are rotated when read can have more columns, padding included, although
    every position is in range. For encodings that are not linear, Gather therefore reads the rows before the node.
    """
    return rotate_at(rewriter, node, node.inputs[1])


def rotate_at(rewriter: Rewriter, node: ir.Node, positions: Optional[ir.Value]) -> ir.Value:
    """`rotate` with other rows [B,S] of the tables than those of the node."""
    x, _, cos, sin = node.inputs
    assert x is not None and cos is not None and sin is not None
    heads, rotary = size(x, 2), 2 * size(cos, 1)
    rows = rewriter.emit("Max", [positions, rewriter.constant(0)])
    attributes = {"interleaved": number(node, "interleaved"), "num_heads": heads}
    if rotary < size(x, 3):
        attributes["rotary_embedding_dim"] = rotary
    tables = [cos, sin] if x.dtype == ir.DataType.FLOAT else [rewriter.table(cos), rewriter.table(sin)]
    if number(node, "linear"):
        sources = [*tables, rows]
    else:
        sources = [rewriter.emit("Gather", [table, rows]) for table in tables]
    turned = rewriter.unpacked(rewriter.emit("RotaryEmbedding", [rewriter.packed(x), *sources], attributes=attributes), heads)
    turned.shape = x.shape
    return turned


def distances(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Subtract query positions from key positions as int64, which is exact at any offset: [B,1,S,T] float32."""
    queries = rewriter.emit("Unsqueeze", [node.inputs[0], rewriter.constant([1, 3])])
    keys = rewriter.emit("Unsqueeze", [node.inputs[1], rewriter.constant([1, 2])])
    return rewriter.emit("Cast", [rewriter.emit("Sub", [keys, queries])], attributes={"to": int(ir.DataType.FLOAT)})


def mask(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Additive mask [B,1 or H,S,T] in the dtype of activations: the bias, or 0, for visible keys, -inf for the others."""
    positions, key_positions, bias, _ = node.inputs
    before, after, chunk = (number(node, name) for name in ("before", "after", "chunk"))
    keys = rewriter.emit("Unsqueeze", [key_positions, rewriter.constant([1])])
    queries = rewriter.emit("Unsqueeze", [positions, rewriter.constant([2])])
    rules = [("GreaterOrEqual", keys, rewriter.constant(0))]
    if after >= 0:
        rules.append(("LessOrEqual", keys, rewriter.emit("Add", [queries, rewriter.constant(after)]) if after else queries))
    if before >= 0:
        rules.append(("GreaterOrEqual", keys, rewriter.emit("Sub", [queries, rewriter.constant(before)])))
    if chunk:  # integer Div rounds towards 0, which equals floor for visible keys, whose positions are at least 0
        key_chunks, query_chunks = (rewriter.emit("Div", [value, rewriter.constant(chunk)]) for value in (keys, queries))
        rules.append(("Equal", key_chunks, query_chunks))
    found = [rewriter.emit(op, [left, right]) for op, left, right in rules]
    visible = rewriter.emit("Unsqueeze", [functools.reduce(lambda a, b: rewriter.emit("And", [a, b]), found), rewriter.constant([1])])
    if bias is None:  # expanded over queries, over which Attention does not broadcast a mask
        zero = rewriter.constant(0, "float32")
        scores = zero if len(found) > 1 else _for_every_query(rewriter, positions, zero)
    else:
        scores = bias
    return in_dtype(rewriter, rewriter.emit("Where", [visible, scores, rewriter.constant(NEVER, "float32")]))


def _for_every_query(rewriter: Rewriter, positions: Optional[ir.Value], zero: ir.Value) -> ir.Value:
    """Expand zero to [1,1,S,1], with S taken from positions [B,S]."""
    count = rewriter.emit("Shape", [positions], attributes={"start": 1, "end": 2})
    return rewriter.emit("Expand", [zero, rewriter.emit("Concat", [rewriter.constant([1, 1]), count, rewriter.constant([1])], attributes={"axis": 0})])


def in_dtype(rewriter: Rewriter, value: ir.Value) -> ir.Value:
    """Cast a float32 value to the dtype of activations."""
    if rewriter.dtype == "float32":
        return value
    value.dtype = ir.DataType.FLOAT  # read by in_float; emitted values have no dtype otherwise
    return rewriter.emit("Cast", [value], attributes={"to": int(rewriter.onnx_dtype)})


def as_is(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Return the first input of the node."""
    value = node.inputs[0]
    assert value is not None
    return value


def appended_here(node: ir.Node) -> Optional[Tuple[ir.Node, ir.Node]]:
    """Return the Append nodes that produce keys and values of an Attend; None if another node reads them or another kind of node produces them."""
    found = [producer(value, "Append") for value in node.inputs[1:3]]
    if any(append is None or [user for user, _ in append.outputs[0].uses()] != [node] for append in found):
        return None
    return found[0], found[1]  # type: ignore[return-value]


def content_of(node: ir.Node) -> Optional[ir.Value]:
    """Return the content scores [B,H,S,T] of an Attend, or None."""
    return node.inputs[4] if len(node.inputs) > 4 else None


def sinks_of(node: ir.Node) -> Optional[ir.Value]:
    """Return the sinks [H] of an Attend, or None."""
    return node.inputs[5] if len(node.inputs) > 5 else None


def whole_mask(rewriter: Rewriter, node: ir.Node) -> Optional[ir.Value]:
    """Return the sum of mask and content scores of an Attend, float32."""
    wide, content = in_float(rewriter, node.inputs[3]), content_of(node)
    return wide if content is None else rewriter.emit("Add", [wide, content])


def scores_of(node: ir.Node) -> Dict[str, float]:
    """Return the attributes of an attention node for scaling and capping scores."""
    softcap = float(node.attributes["softcap"].value)
    return {"scale": float(node.attributes["scale"].value), **({"softcap": softcap} if softcap else {})}


def attend(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Attention over given keys and values [B,K,T,D] in float32. In float16, the products of Attention could exceed 65504."""
    if shares_of(node) is not None:
        return _attend_with_shares(rewriter, node)
    q, keys, values = (in_float(rewriter, value) for value in node.inputs[:3])
    mask = whole_mask(rewriter, node)
    if sinks_of(node) is not None:
        keys, values, mask = _with_sinks(rewriter, node, keys, values, mask)
    by_head = rewriter.emit("Transpose", [q], attributes={"perm": [0, 2, 1, 3]})
    y = rewriter.emit("Attention", [by_head, keys, values, mask], attributes=scores_of(node))
    return in_dtype(rewriter, rewriter.packed(rewriter.emit("Transpose", [y], attributes={"perm": [0, 2, 1, 3]})))


def shares_of(node: ir.Node) -> Optional[ir.Node]:
    """Return the Shares node of an Attend, or None."""
    return next((user for user, _ in node.outputs[0].uses() if user.op_type == "Shares"), None)


def _attend_with_shares(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Emit product, softmax and weighted sum as separate nodes, as in ops.attend_with_shares."""
    reader = shares_of(node)
    assert reader is not None
    found = rewriter.emit("Mul", [products_of(rewriter, node, *node.inputs[:2]), rewriter.constant(scores_of(node)["scale"], "float32")])
    scores = rewriter.emit("Clip", [rewriter.emit("Add", [found, whole_mask(rewriter, node)]), rewriter.constant(LEAST, "float32")])
    shares = rewriter.emit("Softmax", [scores], attributes={"axis": -1})
    reader.outputs[0].replace_all_uses_with(shares)
    return mix_of(rewriter, node, shares, node.inputs[2])


def _with_sinks(rewriter: Rewriter, node: ir.Node, keys: Optional[ir.Value], values: Optional[ir.Value], mask: Optional[ir.Value]) -> Tuple[ir.Value, ir.Value, ir.Value]:
    """Prepend a key and a value of zeros, and a mask column with the sink of each head as score. Return keys, values and mask."""
    front = [rewriter.constant([1, 0]), rewriter.constant(0, "float32"), rewriter.constant([2])]
    keys, values = (rewriter.emit("Pad", [value, *front]) for value in (keys, values))
    sinks = rewriter.emit("Unsqueeze", [in_float(rewriter, sinks_of(node)), rewriter.constant([0, 2, 3])])
    shape = rewriter.emit("Shape", [mask])
    heads = rewriter.constant([number(node, "heads")])
    rows, queries, columns = (rewriter.emit("Gather", [shape, rewriter.constant([axis])]) for axis in (0, 2, 3))
    for_sinks = rewriter.emit("Concat", [rows, heads, queries, rewriter.constant([1])], attributes={"axis": 0})
    for_mask = rewriter.emit("Concat", [rows, heads, queries, columns], attributes={"axis": 0})
    parts = [rewriter.emit("Expand", [sinks, for_sinks]), rewriter.emit("Expand", [mask, for_mask])]
    return keys, values, rewriter.emit("Concat", parts, attributes={"axis": 3})


def products(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Products of queries [B,S,H,D] and grouped keys [B,K,T,D]: [B,H,S,T] float32."""
    return products_of(rewriter, node, *node.inputs)


def products_of(rewriter: Rewriter, node: ir.Node, q: Optional[ir.Value], keys: Optional[ir.Value], queries: Optional[ir.Value] = None) -> ir.Value:
    """Products of q [B,S,H,D] and keys [B,K,T,D] for a node with attributes heads and kv_heads: [B,H,S,T] float32. queries: S, [1], needed if T may be 0."""
    by_head = rewriter.emit("Transpose", [in_float(rewriter, q)], attributes={"perm": [0, 2, 1, 3]})
    turned = rewriter.emit("Transpose", [in_float(rewriter, keys)], attributes={"perm": [0, 1, 3, 2]})
    return _grouped(rewriter, node, by_head, turned, queries)


def mix(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Sum grouped values [B,K,T,D] weighted by shares [B,H,S,T]: [B,S,H*D]."""
    return mix_of(rewriter, node, *node.inputs)


def mix_of(rewriter: Rewriter, node: ir.Node, shares: Optional[ir.Value], values: Optional[ir.Value]) -> ir.Value:
    """Sum values [B,K,T,D] weighted by shares [B,H,S,T] for a node with attributes heads and kv_heads: [B,S,H*D]."""
    y = _grouped(rewriter, node, shares, in_float(rewriter, values))
    return rewriter.packed(in_dtype(rewriter, rewriter.emit("Transpose", [y], attributes={"perm": [0, 2, 1, 3]})))


def _grouped(rewriter: Rewriter, node: ir.Node, left: Optional[ir.Value], right: Optional[ir.Value], queries: Optional[ir.Value] = None) -> ir.Value:
    """Multiply left [B,H,S,*] with right [B,K,*,n], where H/K heads share one right operand: [B,H,S,n].

    These heads are stacked as rows of one product, so that each right operand is read once.
    """
    heads, kv_heads = number(node, "heads"), number(node, "kv_heads")
    if heads == kv_heads:
        return rewriter.emit("MatMul", [left, right])
    as_rows = rewriter.emit("Reshape", [left, rewriter.constant([0, kv_heads, -1, 0])])
    y = rewriter.emit("MatMul", [as_rows, right])
    if queries is None:
        return rewriter.emit("Reshape", [y, rewriter.constant([0, heads, -1, 0])])
    sizes = [rewriter.constant([0, heads]), queries, rewriter.constant([-1])]
    return rewriter.emit("Reshape", [y, rewriter.emit("Concat", sizes, attributes={"axis": 0})])


def select_tokens(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    x, index = node.inputs
    return rewriter.emit("GatherND", [x, rewriter.emit("Unsqueeze", [index, rewriter.constant([2])])], attributes={"batch_dims": 1})


def pick(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """rows [B,H,S,R] at index [B,1 or H,S,T]: [B,H,S,T], as ops.pick."""
    rows, index = node.inputs
    return rewriter.emit("GatherElements", [rows, for_every_head(rewriter, index, rows)], attributes={"axis": -1})


def for_every_head(rewriter: Rewriter, index: Optional[ir.Value], like: Optional[ir.Value]) -> ir.Value:
    """Expand index [B,1 or H,S,T] to [B,H,S,T], with H taken from like."""
    known = like is not None and like.shape is not None and isinstance(like.shape[1], int)
    heads = rewriter.constant([size(like, 1)]) if known else rewriter.emit("Shape", [like], attributes={"start": 1, "end": 2})
    shape = rewriter.emit("Concat", [rewriter.constant([1]), heads, rewriter.constant([1, 1])], attributes={"axis": 0})
    return rewriter.emit("Expand", [index, shape])


def suffix_sum(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    return rewriter.emit("CumSum", [node.inputs[0], rewriter.constant(-1)], attributes={"reverse": 1, "exclusive": 1 - number(node, "own")})


def recur(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """GRU over the first `count` tokens of each row. A row with count 0 keeps its hidden vector."""
    x, hidden, weight, recurrent, bias, recurrent_bias = (in_float(rewriter, value) for index, value in enumerate(node.inputs) if index != 2)
    count = rewriter.emit("Cast", [node.inputs[2]], attributes={"to": int(ir.DataType.INT32)})
    width, front = number(node, "hidden"), rewriter.constant([0])
    gates = [rewriter.emit("Unsqueeze", [_reordered(rewriter, part, width), front]) for part in (weight, recurrent)]
    biases = rewriter.emit("Concat", [_reordered(rewriter, part, width) for part in (bias, recurrent_bias)], attributes={"axis": 0})
    by_time = rewriter.emit("Transpose", [x], attributes={"perm": [1, 0, 2]})
    lengths = rewriter.emit("Squeeze", [count, rewriter.constant([1])])
    sources = [by_time, *gates, rewriter.emit("Unsqueeze", [biases, front]), lengths, rewriter.emit("Unsqueeze", [hidden, front])]
    y, last = rewriter.emit_all("GRU", sources, 2, attributes={"hidden_size": width, "linear_before_reset": 1})
    has_tokens = rewriter.emit("Greater", [count, rewriter.constant(0, "int32")])
    kept = rewriter.emit("Where", [has_tokens, rewriter.emit("Squeeze", [last, front]), hidden])
    for user, _ in list(node.outputs[0].uses()):
        if user.op_type == "LastHidden":
            user.outputs[0].replace_all_uses_with(in_dtype(rewriter, kept), replace_graph_outputs=True)
    by_row = rewriter.emit("Transpose", [rewriter.emit("Squeeze", [y, rewriter.constant([1])])], attributes={"perm": [1, 0, 2]})
    return in_dtype(rewriter, by_row)


def _reordered(rewriter: Rewriter, weight: Optional[ir.Value], width: int) -> ir.Value:
    """Reorder the gates of torch (reset, update, new) to the order of ONNX (update, reset, new)."""
    order = np.concatenate((np.arange(width, 2 * width), np.arange(width), np.arange(2 * width, 3 * width)))
    return rewriter.emit("Gather", [weight, rewriter.constant(order)], attributes={"axis": 0})


def in_float(rewriter: Rewriter, value: Optional[ir.Value]) -> Optional[ir.Value]:
    """Return a value in the dtype of activations as float32. For a value that was cast from float32, return the value before the cast."""
    if rewriter.dtype == "float32":
        return value
    cast = None if value is None else value.producer()
    if cast is not None and cast.op_type == "Cast" and cast.inputs[0] is not None and cast.inputs[0].dtype == ir.DataType.FLOAT:
        return cast.inputs[0]
    return rewriter.emit("Cast", [value], attributes={"to": int(ir.DataType.FLOAT)})


LOWERING = {
    "Rotate": rotate,
    "Attend": attend,
    "Products": products,
    "Mix": mix,
    "SelectTokens": select_tokens,
    "JoinRotations": two_rotations.key,
    "ChooseRotation": two_rotations.query,
    "Pick": pick,
    "SuffixSum": suffix_sum,
    "Recur": recur,
    "Experts": experts.dense,
}
