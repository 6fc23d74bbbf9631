"""Lowerings to standard operators that ONNX targets share: rotation, mask, attention."""

import functools
from functools import partial
from typing import Any, Mapping

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets.builder import FLOAT, INT32, Builder, NodeLowering, size
from posenc_export.ops import graph
from posenc_export.ops.graph import Append, Attend, AttentionWeights, LastHidden
from posenc_export.shared.numerics import FINE, LEVELS

TWO: Any = {"num_outputs": 2}
NEVER = -np.inf
GAPS = "attention_mask: expected no 0 between the ones of a row; put padding before or behind"
# Lower bound of scores, as in ops.attention_weights; a softmax over -inf only gives NaN.
LEAST = -1e30
# Nodes with grouped heads.
Grouped = Attend | graph.Products | graph.WeightedValues | graph.RowsAtCounts


def rows_of_levels(op: Builder, table: ir.Value, positions: ir.Value) -> ir.Value | None:
    """Return the rows of a table at positions of at least 0, float32; None for one of one level.

    They are computed in the graph from two small tables (encodings/shared/tables.py), which take a
    43rd of the bytes of a table of 32,768 positions and 128 pairs.
    """
    name, stored = op.levels.get(str(table.name), ("", None))
    if stored is None:
        return None
    coarse, fine = (
        op.weight(f"{name}.{level}", partial(getattr, stored.levels, level)) for level in LEVELS
    )
    cos, sin = op.several(2, "Split", op.Gather(coarse, op.Div(positions, FINE)), axis=-1, **TWO)
    of_fine = op.several(2, "Split", op.Gather(fine, op.Mod(positions, FINE)), axis=-1, **TWO)
    if stored.sines:
        wave = op.Add(op.Mul(sin, of_fine[0]), op.Mul(cos, of_fine[1]))
    else:
        wave = op.Sub(op.Mul(cos, of_fine[0]), op.Mul(sin, of_fine[1]))
    return op.Cast(wave, to=FLOAT)


def gathered_levels(op: Builder, node: ir.Node) -> ir.Value | None:
    """Lower a Gather of the rows of a table at positions."""
    table, positions = node.inputs
    assert table is not None and positions is not None
    return rows_of_levels(op, table, positions)


def rotate(op: Builder, node: graph.Rotate) -> ir.Value:
    """Rotate packed heads with RotaryEmbedding-23. Position -1 reads row 0; the result belongs to
    padding and is masked.

    With position_ids, the node refuses more columns than its tables have rows. Keys that are
    rotated when read can have more columns, padding included, although every position is in range.
    For encodings that are not linear, Gather therefore reads the rows before the node.
    """
    x, tables = node.x, [node.cos, node.sin]
    heads, rotary = size(x, 2), 2 * size(node.cos, 1)
    rows = op.Max(node.positions, 0)
    computed = [rows_of_levels(op, table, rows) for table in tables]
    attributes = {"interleaved": int(node.interleaved), "num_heads": heads}
    if rotary < size(x, 3):
        attributes["rotary_embedding_dim"] = rotary
    if all(computed):
        sources = [in_dtype(op, wave) for wave in computed if wave is not None]
    else:
        tables = tables if x.dtype == ir.DataType.FLOAT else [op.table(table) for table in tables]
        sources = [*tables, rows] if node.linear else [op.Gather(table, rows) for table in tables]
    rotated = op.split_heads(op.RotaryEmbedding(op.merge_heads(x), *sources, **attributes), heads)
    rotated.shape = x.shape
    return rotated


def distances(op: Builder, node: graph.Distances) -> ir.Value:
    """Subtract positions as int64, which is exact at any offset: [B,1,S,T] float32."""
    queries = op.Unsqueeze(node.q_positions, [1, 3])
    keys = op.Unsqueeze(node.k_positions, [1, 2])
    return op.Cast(op.Sub(keys, queries), to=FLOAT)


def mask(op: Builder, node: graph.Mask) -> ir.Value:
    """Additive mask [B,1 or H,S,T]: the bias, or 0, for visible keys, -inf for the others."""
    keys = op.Unsqueeze(node.key_positions, [1])
    queries = op.Unsqueeze(node.positions, [2])
    rules = [("GreaterOrEqual", keys, op.constant(0))]
    if node.after >= 0:
        rules.append(("LessOrEqual", keys, op.Add(queries, node.after) if node.after else queries))
    if node.before >= 0:
        rules.append(("GreaterOrEqual", keys, op.Sub(queries, node.before)))
    # Integer Div rounds towards 0, which equals floor for visible keys, whose positions are at
    # least 0.
    if node.chunk:
        key_chunks, query_chunks = (op.Div(value, node.chunk) for value in (keys, queries))
        rules.append(("Equal", key_chunks, query_chunks))
    allowed = [op.node(comparison, left, right) for comparison, left, right in rules]
    visible = op.Unsqueeze(functools.reduce(op.And, allowed), [1])
    if node.bias is not None:
        scores = node.bias
    else:
        scores = op.constant(0, "float32")
        if len(rules) == 1:  # expanded over queries, over which Attention does not broadcast a mask
            count = op.Shape(node.positions, start=1, end=2)
            scores = op.Expand(scores, op.Concat(op.constant([1, 1]), count, [1], axis=0))
    return in_dtype(op, op.Where(visible, scores, op.constant(NEVER, "float32")))


def mask_of_keys(op: Builder, node: graph.Mask, key_positions: ir.Value) -> ir.Value:
    """Return a semantic mask without bias that sees other keys by the rule of a node."""
    rule = {"before": node.before, "after": node.after, "chunk": node.chunk}
    inputs = (node.positions, key_positions, None, node.like)
    return op.Mask(*inputs, domain=graph.DOMAIN, **rule)


def in_dtype(op: Builder, value: ir.Value) -> ir.Value:
    """Cast a float32 value to the dtype of activations."""
    if op.dtype == "float32":
        return value
    value.dtype = ir.DataType.FLOAT  # read by in_float; emitted values have no dtype otherwise
    return op.Cast(value, to=int(op.onnx_dtype))


def refuse_gaps(op: Builder, node: graph.RefuseGaps) -> ir.Value:
    """Look up row 0 of a table with one row. ONNX Runtime names the node if the row is 1."""
    zero = op.Gather(op.constant([0]), node.row)
    producer = zero.producer()
    assert producer is not None
    producer.name = GAPS
    return zero


def appended_here(node: Attend) -> tuple[Append, Append] | None:
    """Return the Append nodes of keys and values if only this Attend reads them."""
    key, value = Append.of(node.keys), Append.of(node.values)
    if (
        key is None
        or value is None
        or any([user for user, _ in append.output.uses()] != [node.node] for append in (key, value))
    ):
        return None
    return key, value


def whole_mask(op: Builder, node: Attend) -> ir.Value:
    """Return the sum of mask and content scores of an Attend, float32."""
    wide = in_float(op, node.mask)
    return wide if node.content is None else op.Add(wide, node.content)


def scores_of(node: Attend) -> dict[str, Any]:
    """Return the attributes of an attention node for scaling and capping scores."""
    return {"scale": node.scale, **({"softcap": node.softcap} if node.softcap else {})}


def attend(op: Builder, node: Attend) -> ir.Value:
    """Attention in float32: in float16, products of Attention could exceed 65504."""
    if node.readers(AttentionWeights):
        return _attend_in_steps(op, node)
    q, keys, values = (in_float(op, value) for value in (node.q, node.keys, node.values))
    mask = whole_mask(op, node)
    if node.sinks is not None:
        keys, values, mask = _with_sinks(op, node, keys, values, mask)
    by_head = op.Transpose(q, perm=[0, 2, 1, 3])
    y = op.Attention(by_head, keys, values, mask, **scores_of(node))
    return in_dtype(op, op.merge_heads(op.Transpose(y, perm=[0, 2, 1, 3])))


def _attend_in_steps(op: Builder, node: Attend) -> ir.Value:
    """Emit product, softmax and weighted sum as separate nodes, as in ops.attend_with_weights."""
    products = op.Mul(products_of(op, node, node.q, node.keys), op.constant(node.scale, "float32"))
    scores = op.Clip(op.Add(products, whole_mask(op, node)), op.constant(LEAST, "float32"))
    weights = op.Softmax(scores, axis=-1)
    for reader in node.readers(AttentionWeights):
        reader.output.replace_all_uses_with(weights)
    return weighted_sum(op, node, weights, node.values)


def _with_sinks(
    op: Builder, node: Attend, keys: ir.Value, values: ir.Value, mask: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Prepend zeros to keys and values, and the sink of each head to the mask."""
    assert node.sinks is not None
    front = [op.constant([1, 0]), op.constant(0, "float32"), op.constant([2])]
    keys, values = (op.Pad(value, *front) for value in (keys, values))
    sinks = op.Unsqueeze(in_float(op, node.sinks), [0, 2, 3])
    rows, queries = (op.Shape(mask, start=axis, end=axis + 1) for axis in (0, 2))
    of_sinks = op.Expand(sinks, op.Concat(rows, [1], queries, [1], axis=0))
    return keys, values, op.Concat(of_sinks, op.Expand(mask, [1, node.heads, 1, 1]), axis=3)


def products_of(
    op: Builder, node: Grouped, q: ir.Value, keys: ir.Value, queries: ir.Value | None = None
) -> ir.Value:
    """Products of q, keys by grouped heads, [B,H,S,T] float32; queries: S [1], if T may be 0."""
    by_head = op.Transpose(in_float(op, q), perm=[0, 2, 1, 3])
    columns = op.Transpose(in_float(op, keys), perm=[0, 1, 3, 2])
    return _grouped(op, node, by_head, columns, queries)


def weighted_sum(op: Builder, node: Grouped, weights: ir.Value, values: ir.Value) -> ir.Value:
    """Sum values [B,K,T,D] with weights [B,H,S,T] and the heads of a node: [B,S,H*D]."""
    y = _grouped(op, node, weights, in_float(op, values))
    return op.merge_heads(in_dtype(op, op.Transpose(y, perm=[0, 2, 1, 3])))


def _grouped(
    op: Builder, node: Grouped, left: ir.Value, right: ir.Value, queries: ir.Value | None = None
) -> ir.Value:
    """Multiply left [B,H,S,*] with right [B,K,*,n], where H/K heads share one right operand:
    [B,H,S,n].

    These heads are stacked as rows of one product, so that each right operand is read once.
    """
    if node.heads == node.kv_heads:
        return op.MatMul(left, right)
    as_rows = op.Reshape(left, [0, node.kv_heads, -1, 0])
    y = op.MatMul(as_rows, right)
    if queries is None:
        return op.Reshape(y, [0, node.heads, -1, 0])
    return op.Reshape(y, op.Concat(op.constant([0, node.heads]), queries, [-1], axis=0))


def recur(op: Builder, node: graph.Recur) -> ir.Value:
    """GRU over the first `count` tokens of each row. A row with count 0 keeps its hidden vector."""
    sources = (node.x, node.hidden, node.weight, node.recurrent, node.bias, node.recurrent_bias)
    x, hidden, weight, recurrent, bias, recurrent_bias = (in_float(op, value) for value in sources)
    count = op.Cast(node.count, to=INT32)
    width, front = node.width, op.constant([0])
    gates = [op.Unsqueeze(_reordered(op, part, width), front) for part in (weight, recurrent)]
    biases = op.Concat(*(_reordered(op, part, width) for part in (bias, recurrent_bias)), axis=0)
    by_time = op.Transpose(x, perm=[1, 0, 2])
    lengths = op.Squeeze(count, [1])
    inputs = [by_time, *gates, op.Unsqueeze(biases, front), lengths, op.Unsqueeze(hidden, front)]
    y, last = op.several(2, "GRU", *inputs, hidden_size=width, linear_before_reset=1)
    has_tokens = op.Greater(count, op.constant(0, "int32"))
    kept = op.Where(has_tokens, op.Squeeze(last, front), hidden)
    for reader in node.readers(LastHidden):
        reader.output.replace_all_uses_with(in_dtype(op, kept), replace_graph_outputs=True)
    return in_dtype(op, op.Transpose(op.Squeeze(y, [1]), perm=[1, 0, 2]))


def _reordered(op: Builder, weight: ir.Value, width: int) -> ir.Value:
    """Reorder the gates of torch (reset, update, new) to the order of ONNX (update, reset, new)."""
    reset, update, new = np.arange(3 * width).reshape(3, width)
    order = np.concatenate((update, reset, new))
    return op.Gather(weight, order, axis=0)


def choice_of_booleans(op: Builder, node: ir.Node) -> ir.Value | None:
    """Where of booleans by Or and And, since ONNX Runtime has no kernel for it on CPUs."""
    condition, first, second = node.inputs
    if node.outputs[0].dtype != ir.DataType.BOOL:
        return None
    return op.Or(op.And(condition, first), op.And(op.Not(condition), second))


def norm_of_one_type(op: Builder, node: ir.Node) -> ir.Value | None:
    """RMSNormalization of an input in half precision by a scale in float32, which torch.onnx makes
    of a cast and a norm, with the cast: ONNX Runtime multiplies both types otherwise.
    """
    x, scale = node.inputs
    if x is None or scale is None or x.dtype == scale.dtype or scale.dtype is None:
        return None
    attributes = {name: value.value for name, value in node.attributes.items()}
    return op.RMSNormalization(op.Cast(x, to=scale.dtype), scale, **attributes)


def in_float(op: Builder, value: ir.Value) -> ir.Value:
    """Return a value as float32; the value before the cast, if it was cast from float32."""
    if op.dtype == "float32":
        return value
    cast = value.producer()
    if (
        cast is not None
        and cast.op_type == "Cast"
        and cast.inputs[0] is not None
        and cast.inputs[0].dtype == ir.DataType.FLOAT
    ):
        return cast.inputs[0]
    return op.Cast(value, to=FLOAT)


# Of standard nodes, by operator.
NODES: Mapping[str, NodeLowering] = {
    "Gather": gathered_levels,
    "Where": choice_of_booleans,
    "RMSNormalization": norm_of_one_type,
}
