"""Terms of scores by distance, as inputs of CachedAttention (packages/kernels): biases as tables or
as pieces of a linear function, products with keys of distances, and entries of rows by distance.

A value is a function of the distance if the distance of query and key is all that its nodes compute
with: each of them computes every entry of its output from the same entry of its inputs, or only
moves axes.
"""

from pathlib import Path
from typing import Any, Sequence

import numpy as np
import onnx_ir as ir

from posenc_export.export.numbers import BY_DISTANCE
from posenc_export.export.targets import ort_slots
from posenc_export.export.targets.builder import DOUBLE, FLOAT, Builder, numbers_of, size
from posenc_export.ops.graph import (
    Append,
    Attend,
    AttentionWeights,
    CollectByDistance,
    Distances,
    LayersOfRatio,
    Mask,
    Pick,
    RowsAtCounts,
    SumsBetween,
    WaveProducts,
)
from posenc_export.runtime.graphs.onnx_parts import opened

BY_ENTRY = set(
    "Abs Add And Cast Ceil Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual "
    "Identity LeakyRelu Less LessOrEqual Log Max Min Mod Mul Neg Not Or Pow Reciprocal Relu Round "
    "Sigmoid Sign Sin Softplus Sqrt Sub Tanh Where Xor".split()
)
AXES = {"Expand", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
# With a constant operand: rows of it by an index, and products with it.
WITH_CONSTANT = {"Gather": 0, "MatMul": 1, "Gemm": 1}
MOST = 1 << 24  # numbers of a table: 64 MB
OPSET = 23
PROBE = np.array([[3, 1, 0], [9, 2, 1]])  # distances [S,T] that must have the same biases
# Distances before 0 and after the largest one that have keys, for those between two keys: twice
# NEIGHBOURS of packages/kernels/source/call.h.
BEYOND = 32
# Of the operator by name (runtime/verification/conformance/attention.py).
Inputs = dict[str, ir.Value | None]


def table_of(op: Builder, mask: Mask, heads: int) -> ir.Value | None:
    """Return the table of the bias of a mask, or None if it is no function of head and distance.

    Larger distances than those of the table have the last entry.
    """
    bias = mask.bias
    assert bias is not None
    name, sources = f"{bias.name}{BY_DISTANCE}", _distances_of(op, mask, bias)
    if name in op.graph.initializers:
        return op.graph.initializers[name]
    if heads * op.max_positions > MOST or not sources:
        return None
    table = _table(op, bias, heads, sources)
    return None if table is None else op.weight(name, lambda: table, ir.DataType.FLOAT)


def rows_of(op: Builder, mask: Mask, index: ir.Value) -> ir.Value | None:
    """Return the rows [range] int32 that an index [B,1,S,T] takes by distance, or None if it
    depends on something else. Larger distances have the last one.
    """
    sources = _distances_of(op, mask, index)
    rows = _table(op, index, 1, sources) if sources else None
    if rows is None:
        return None
    return op.weight(f"{index.name}.row_of_distance", lambda: rows[0].astype(np.int32))


def at_distances(op: Builder, mask: Mask, value: ir.Value) -> ir.Value | None:
    """Emit nodes that compute a value [B,1,S,T] at every distance [range], from constants alone, or
    return None if it depends on something else.
    """
    sources = _distances_of(op, mask, value)
    if not sources:
        return None
    copies: dict[ir.Value, ir.Value] = {}
    for source, sign in sources.items():
        counted = op.Range(op.constant(0), op.constant(sign * op.max_positions), op.constant(sign))
        copies[source] = op.Unsqueeze(op.Cast(counted, to=int(_element(source))), [0, 1, 2])

    def copied(value: ir.Value | None) -> ir.Value | None:
        if value is None or value.const_value is not None:
            return value
        node = value.producer()
        if value not in copies and node is not None:
            operands = [copied(source) for source in node.inputs]
            attributes: Any = dict(node.attributes)
            copies[value] = op.node(node.op_type, *operands, **attributes)
        return copies[value]

    return op.Reshape(copied(value), [-1])


def _distances_of(op: Builder, mask: Mask, value: ir.Value) -> dict[ir.Value, int]:
    """Return the distances that a value is computed from, and whether they count back from the
    query to the key (1) or ahead (-1); none if something else than distances decides it, or if
    they are more than MOST. mask: whose positions of queries and keys are subtracted.
    """
    if op.max_positions > MOST:
        return {}
    sources: dict[ir.Value, int] = {}
    seen: set[ir.Value] = set()
    remaining: list[ir.Value | None] = [value]
    while remaining:
        part = remaining.pop()
        if part is None or part.const_value is not None or part in seen:
            continue
        seen.add(part)
        node, sign = part.producer(), _sign(mask, part)
        if sign:
            sources[part] = sign
        elif node is None or node.domain or not _by_entry(node):
            return {}
        else:
            remaining += node.inputs
    return sources


def _by_entry(node: ir.Node) -> bool:
    """Return whether a node computes each entry of its output from one entry of its inputs."""
    constant = WITH_CONSTANT.get(node.op_type)
    if constant is not None:
        operand = node.inputs[constant]
        return operand is not None and operand.const_value is not None
    if node.op_type in AXES:  # to a shape that is known
        return all(value is None or value.const_value for value in node.inputs[1:])
    return node.op_type in BY_ENTRY


def _sign(mask: Mask, value: ir.Value) -> int:
    """Return 1 for the distance from a query back to a key, -1 for its negative, else 0."""
    distances, node = Distances.of(value), value.producer()
    if distances is not None:
        return -_of_mask(mask, distances.q_positions, distances.k_positions)
    if node is None or node.op_type != "Sub" or node.domain:
        return 0
    first, second = (_source(operand) for operand in node.inputs)
    return _of_mask(mask, first, second) - _of_mask(mask, second, first)


def _of_mask(mask: Mask, queries: ir.Value | None, keys: ir.Value | None) -> bool:
    """Return whether these are the positions of queries and keys of a mask."""
    return (queries, keys) == (mask.positions, mask.key_positions)


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return the value that another one repeats with further axes."""
    node = None if value is None else value.producer()
    while node is not None and not node.domain and node.op_type == "Unsqueeze":
        value = node.inputs[0]
        node = None if value is None else value.producer()
    return value


def _table(
    op: Builder, value: ir.Value, heads: int, sources: dict[ir.Value, int]
) -> np.ndarray | None:
    """Evaluate a value at every distance [H,range], without the last columns if they are equal.
    None if it has another result for the same distance.
    """
    evaluate = opened(_model(value, list(sources)), Path(".")).run

    def results(distances: np.ndarray) -> np.ndarray:  # [S,T] to [H,S,T]
        feeds = {
            f"distance_{number}": (sign * distances).astype(_element(source).numpy())[None, None]
            for number, (source, sign) in enumerate(sources.items())
        }
        return np.broadcast_to(evaluate(None, feeds)[0], (1, heads, *distances.shape))[0]

    table = results(np.arange(op.max_positions)[None])[:, 0]
    probe = np.minimum(PROBE, op.max_positions - 1)
    if not np.array_equal(results(probe), table[:, probe], equal_nan=True):
        return None
    changes = np.flatnonzero((table[:, 1:] != table[:, :-1]).any(0))
    last = int(changes[-1]) + 1 if len(changes) else 0
    return np.ascontiguousarray(table[:, : last + 1])


def _element(source: ir.Value) -> ir.DataType:
    """Return the element type of a distance: int64 for a difference of positions."""
    integers = source.dtype == ir.DataType.INT64
    return ir.DataType.INT64 if integers else ir.DataType.FLOAT


def _model(value: ir.Value, sources: Sequence[ir.Value]) -> bytes:
    """Return a model of the nodes that compute a value from distances."""
    assert value.graph is not None
    part = ir.convenience.extract(value.graph, sources, [value])
    for number, (copied, source) in enumerate(zip(part.inputs, sources, strict=True)):
        copied.name, copied.shape = f"distance_{number}", None
        copied.type = ir.TensorType(_element(source))
    part.outputs[0].type = ir.TensorType(value.dtype or ir.DataType.FLOAT)
    for node in part:
        node.outputs[0].shape = None  # that of a call
    part.opset_imports.clear()
    part.opset_imports[""] = OPSET
    return ir.to_proto(ir.Model(part, ir_version=10)).SerializeToString()


def keys_of(op: Builder, node: Attend, mask: Mask, wide: int) -> Inputs:
    """Return the inputs distance_queries [B,H,S,wide] and distance_keys [H,n,wide] for the
    content of a node; none if that is not the products of projected queries with sinusoids of the
    distances of the mask. wide: head size of cached keys.

    The projection is a constant W_h [D,E] of each head. A query times W_h times the sinusoids R_d
    is the query times the key W_h R_d: D multiplications in place of E. Keys of every second
    distance are enough, because sinusoids with at most 1 radian per position can be interpolated.
    """
    waves = WaveProducts.of(node.content)
    product = None if waves is None else waves.q.producer()
    if waves is None or product is None or product.op_type != "MatMul":
        return {}
    q, weight = product.inputs
    own = _of_mask(mask, waves.q_positions, waves.k_positions)
    if not own or q is None or weight is None or weight.const_value is None:
        return {}
    count = min(size(waves.waves, 0), mask.before + 1 or op.max_positions)
    fits = node.heads * count * wide <= MOST and count > BEYOND
    if not fits or not ort_slots.in_slots(op, waves.k_positions):
        return {}
    of_head = op.Transpose(weight, perm=[0, 2, 1])
    keys = op.MatMul(_sinusoids(op, waves.waves, count), of_head)
    missing, zero = wide - size(weight, 1), op.constant(0, "float32")
    if missing:
        q, keys = (op.Pad(value, [0, missing], zero, [-1]) for value in (q, keys))
    return {"distance_queries": q, "distance_keys": keys}


def _sinusoids(op: Builder, waves: ir.Value, count: int) -> ir.Value:
    """Return sines and cosines [n,E] of every second distance, from at least count - 1 + BEYOND to
    -BEYOND, as nodes of constants, which ONNX Runtime computes when it loads the graph.
    """

    def rows(first: int, end: int) -> Sequence[ir.Value]:
        return op.several(2, "Split", op.Slice(waves, [first], [end], [0]), axis=-1, num_outputs=2)

    cos, sin = rows(1, BEYOND + 1)
    (of_last, own), (of_cos, of_sin) = rows(count - 1, count), rows(0, count)
    after_cos = op.Sub(op.Mul(of_last, cos), op.Mul(own, sin))
    after_sin = op.Add(op.Mul(own, cos), op.Mul(of_last, sin))
    before_cos, before_sin = (
        op.Slice(part, [BEYOND - 1], [-BEYOND - 1], [0], [-1]) for part in (cos, op.Neg(sin))
    )
    sines = op.Concat(before_sin, of_sin, after_sin, axis=0)
    cosines = op.Concat(before_cos, of_cos, after_cos, axis=0)
    whole = op.Concat(sines, cosines, axis=1)  # distances -BEYOND .. count - 1 + BEYOND
    last = count - 1 + 2 * BEYOND
    return op.Slice(whole, [last - last % 2], [-last - 2], [0], [-2])


def pieces_of(op: Builder, mask: Mask) -> Inputs:
    """Return the inputs numbers [range] of distances, factors [B,S] of queries and pieces
    [H,pieces,3] for the bias of a mask; none if it is no function of a number of the distance over
    one of the query.
    """
    node = LayersOfRatio.of(mask.bias)
    if node is None:
        return {}
    weights = (node.first, node.first_bias, node.second, node.second_bias)
    numbers = at_distances(op, mask, node.numbers)
    if numbers is None or not all(weight.const_value for weight in weights):
        return {}
    pieces = _pieces(op, *weights)
    return {"numbers": numbers, "factors": op.Reciprocal(node.divisors), "pieces": pieces}


def _pieces(
    op: Builder, first: ir.Value, first_bias: ir.Value, second: ir.Value, second_bias: ir.Value
) -> ir.Value:
    """Emit nodes of constants, which ONNX Runtime computes in float64 when it loads the graph.

    A unit of the first layer is 0 on one side of the number -bias / weight: pieces begin at these
    numbers in order, and the first one at -inf. Units with weight 0 are the same everywhere, and
    their points, with 1 in place of the weight, change nothing.
    """
    count, zero = size(first, 0), op.constant(0, "float64")
    parts = (op.Reshape(first, [-1]), first_bias, op.Transpose(second, perm=[1, 0]), second_bias)
    weight, bias, of_units, offset = (op.Cast(part, to=DOUBLE) for part in parts)
    is_flat = op.Equal(weight, zero)
    points = op.Div(op.Neg(bias), op.Add(weight, op.Cast(is_flat, to=DOUBLE)))
    in_order = op.several(2, "TopK", points, op.constant([count]), largest=0)[0]
    starts = op.Concat(op.constant([-np.inf], "float64"), in_order, axis=0)
    by_piece = op.Unsqueeze(starts, [1])
    is_after = op.LessOrEqual(points, by_piece)  # [pieces,n]
    rises = op.And(op.Equal(is_after, op.Greater(weight, zero)), op.Not(is_flat))
    constant = op.And(is_flat, op.Greater(bias, zero))
    active = op.Cast(op.Or(rises, constant), to=DOUBLE)
    slopes = op.MatMul(op.Mul(active, weight), of_units)  # [pieces,H]
    values = op.Add(op.MatMul(op.Mul(active, bias), of_units), offset)
    columns = (op.Expand(by_piece, op.Shape(slopes)), slopes, values)
    turned = (op.Unsqueeze(op.Transpose(column, perm=[1, 0]), [2]) for column in columns)
    return op.Cast(op.Concat(*turned, axis=2), to=FLOAT)


def picked(op: Builder, node: Attend, mask: Mask) -> Inputs:
    """Return the inputs for the content of a node, or none if CachedAttention does not compute it.

    A query, or a key, has a row of numbers [R], such as its products with the rows of a table. A
    score is the sum of the entries at the index that the distance of query and key has, or the sum
    of the numbers that the keys after a key have, up to the query's. Inputs are query_rows
    [B,H,S,R] and appended key_rows [B,H*R,T,1] with row_of_distance (rows_of); or appended decays
    of keys [B,H,T,1]; or count_rows, rows of queries that are read at counts of keys [B,H,S,R].
    """
    counted, sums = RowsAtCounts.of(node.content), SumsBetween.of(node.content)
    if counted is not None:
        return {"count_rows": counted.rows}
    if sums is not None:
        known = _sign(mask, sums.distances) == -1 and Append.of(sums.numbers)
        return {"decays": sums.numbers} if known else {}
    pick = Pick.of(node.content)
    rows = None if pick is None else rows_of(op, mask, pick.index)
    if pick is None or rows is None:
        return {}
    inputs: Inputs = {"query_rows": pick.rows, "row_of_distance": rows}
    if pick.key_rows is None:
        return inputs
    if not Append.of(pick.key_rows) or len(pick.key_rows.uses()) > 1:
        return {}  # nothing else may read the cached rows
    return {**inputs, "key_rows": _by_row(op, pick.key_rows)}


def counts_inside(op: Builder, node: RowsAtCounts) -> bool:
    """Return whether CachedAttention can count keys for a node: it has the products of the only
    Attend that reads its output, which has no other content and no bias.
    """
    users = [user for user, _ in node.output.uses()]
    if [user.op_type for user in users] != ["Attend"]:
        return False
    attend, mask = Attend(users[0]), Mask.of(node.mask)
    same = attend.content is node.output and attend.mask is node.mask and attend.keys is node.keys
    if not same or mask is None or mask.bias is not None or attend.softcap:
        return False
    readers = {user for user, _ in node.keys.uses()}
    values = [user for user, _ in attend.values.uses()]
    if readers != {attend.node, node.node} or values != [attend.node]:
        return False
    cached = Append.of(node.keys) and Append.of(attend.values) and ort_slots.by_columns(op) is None
    if not cached or op.dtype != "float32" or attend.readers(AttentionWeights):
        return False
    return node.q is attend.q and node.scale == attend.scale


def _by_row(op: Builder, rows: ir.Value) -> ir.Value:
    """Cache rows of keys [B,H,T,R] as [B,H*R,T,1], so that distant keys, which share a row, have
    neighbouring numbers.
    """
    append = Append.of(rows)
    assert append is not None and append.past.shape is not None
    batch, heads, slots, count = append.past.shape
    append.node.replace_input_with(1, op.Reshape(append.new, [0, 0, -1, 1]))
    append.past.shape = ir.Shape([batch, heads * count, slots, 1])  # type: ignore[operator]
    return rows


def collected(node: Attend, mask: Mask, inputs: Inputs) -> list[ir.Value] | None:
    """Return the sums of an Attend's weights by distance [B,H,S,R], if all readers of its weights
    sum them by the rows that its scores pick; None if one does not. inputs: see `picked`.
    """
    of_queries, by_distance = inputs.get("query_rows"), inputs.get("row_of_distance")
    if of_queries is None or by_distance is None:
        return None
    rows, sums = numbers_of(by_distance), []
    for weights in node.readers(AttentionWeights):
        readers = weights.readers(CollectByDistance)
        if len(readers) < len(weights.output.uses()):
            return None
        for reader in readers:
            own = _of_mask(mask, reader.positions, reader.key_positions)
            clipped = reader.left - np.minimum(np.arange(len(rows)), reader.left)
            same = len(rows) == reader.left + 1 and np.array_equal(rows, clipped)
            if not own or not same or size(of_queries, 3) != reader.left + reader.right + 1:
                return None
            sums.append(reader.output)
    return sums
