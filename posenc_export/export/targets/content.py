"""Lowerings of scores by content, of keys that are turned for each query, and of the gated delta
rule.
"""

import functools
from typing import Any

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import standard
from posenc_export.export.targets.builder import (
    DOUBLE,
    FLOAT,
    INT64,
    MICROSOFT,
    Builder,
    numbers_of,
    size,
)
from posenc_export.ops import graph
from posenc_export.ops.graph import Append, AttendTurnedKeys, LastHidden, RowsAtCounts

# Keys of a block, for each query of a call: larger blocks rotate queries less often and copy more
# of the table.
BLOCK = 256
# Keys that are counted first, for each row of the table: enough for gates of 1/4 on average.
KEYS_PER_ROW = 4
DIGITS = 16  # numbers of a digit of a distance (packages/kernels)


def wave_products(op: Builder, node: graph.WaveProducts) -> ir.Value:
    """Gather rows once for all heads, which are rows of one product: [B,H,S,T]."""
    q, waves = node.q, node.waves
    rows = op.Unsqueeze(_rows_of(op, waves, node.k_positions), [1])
    x, y = _turned(op, node)
    as_rows = op.Reshape(op.Concat(x, y, axis=-1), [0, 1, -1, size(waves, 1)])
    products = op.MatMul(as_rows, op.Transpose(rows, perm=[0, 1, 3, 2]))
    return op.Reshape(products, [0, size(q, 1), -1, 0])


def _rows_of(op: Builder, waves: ir.Value, positions: ir.Value) -> ir.Value:
    return op.Gather(waves, op.Clip(positions, 0, size(waves, 0) - 1))


def _turned(op: Builder, node: graph.WaveProducts) -> tuple[ir.Value, ir.Value]:
    """Return both halves of the queries, rotated by their positions: [B,H,S,E/2]."""
    own = op.Unsqueeze(_rows_of(op, node.waves, node.q_positions), [1])
    cos, sin = op.several(2, "Split", own, axis=-1, num_outputs=2)
    s, c = op.several(2, "Split", node.q, axis=-1, num_outputs=2)
    x = op.Add(op.Mul(s, sin), op.Mul(c, cos))
    return x, op.Sub(op.Mul(c, sin), op.Mul(s, cos))


def consecutive_wave_products(
    op: Builder, node: graph.WaveProducts, first: ir.Value, total: ir.Value
) -> ir.Value:
    """Multiply with the keys at positions first [B,1], first + 1, ..., of which there are total [],
    in blocks: [B,H,S,T].

    (x, y) times (cos((b + n) w), sin((b + n) w)) is (x cos(b w) + y sin(b w), y cos(b w) - x sin(b
    w)) times (cos(n w), sin(n w)). The first factor is computed for the first position b of each
    block, and all blocks share the second, the first rows of the table. Blocks grow with S, which
    bounds the memory for the first factors by that of T / BLOCK queries.
    """
    waves = node.waves
    zero = op.constant(0)
    queries = op.Squeeze(op.Shape(node.q_positions, start=1, end=2))
    block = op.Min(op.Mul(queries, BLOCK), total)
    starts = op.Add(first, op.Range(zero, total, block))
    of_starts = op.Unsqueeze(_rows_of(op, waves, starts), [1, 2])
    cos, sin = op.several(2, "Split", of_starts, axis=-1, num_outputs=2)
    x, y = (op.Unsqueeze(part, [3]) for part in _turned(op, node))
    x_cos, x_sin, y_cos, y_sin = (op.Mul(part, wave) for part in (x, y) for wave in (cos, sin))
    rotated = op.Concat(op.Add(x_cos, y_sin), op.Sub(y_cos, x_sin), axis=-1)
    front = op.constant([0])
    shared = op.Slice(waves, front, op.Unsqueeze(block, front), front)
    products = op.MatMul(rotated, op.Transpose(shared, perm=[1, 0]))
    in_order = op.Reshape(products, [0, 0, 0, -1])
    return op.Slice(in_order, front, op.Unsqueeze(total, front), [3])


def layers_of_ratio(op: Builder, node: graph.LayersOfRatio) -> ir.Value:
    """Both layers are products of a matrix with a row for each query and key: [B,H,S,T]."""
    x = op.Div(node.numbers, op.Unsqueeze(node.divisors, [1, 3]))
    rows = op.Reshape(x, [-1, 1])
    inner = op.Relu(op.Gemm(rows, node.first, node.first_bias, transB=1))
    y = op.Gemm(inner, node.second, node.second_bias, transB=1)
    leading = [op.Shape(x, start=0, end=1), op.Shape(x, start=2, end=4)]
    by_key = op.Reshape(y, op.Concat(*leading, [size(node.second, 0)], axis=0))
    return op.Transpose(by_key, perm=[0, 3, 1, 2])


def pick(op: Builder, node: graph.Pick) -> ir.Value:
    """Entries of rows of queries, and of keys times a factor: [B,H,S,T], as ops.pick."""
    terms = []
    of_heads = [1, size(node.output, 1), 1, 1]
    if node.rows is not None:
        index = op.Expand(node.index, of_heads)
        terms.append(op.GatherElements(node.rows, index, axis=-1))
    if node.key_rows is not None:
        index = op.Expand(op.Transpose(node.index, perm=[0, 1, 3, 2]), of_heads)
        of_keys = op.GatherElements(node.key_rows, index, axis=-1)
        by_query = op.Transpose(of_keys, perm=[0, 1, 3, 2])
        terms.append(op.Mul(by_query, op.constant(node.factor, "float32")))
    return functools.reduce(op.Add, terms)


def sums_between(op: Builder, node: graph.SumsBetween) -> ir.Value:
    """The sum after each key less the sum after the query, in float64, as ops.sums_between."""
    numbers = op.Squeeze(op.Cast(node.numbers, to=DOUBLE), [3])
    is_after = op.Cast(op.Greater(node.distances, op.constant(0, "float32")), to=DOUBLE)
    after = op.MatMul(numbers, op.Transpose(op.Squeeze(is_after, [1]), perm=[0, 2, 1]))
    sums = op.CumSum(op.Unsqueeze(numbers, [2]), -1, reverse=1, exclusive=1)
    return op.Cast(op.Sub(sums, op.Unsqueeze(after, [3])), to=FLOAT)


def collect_by_distance(op: Builder, node: graph.CollectByDistance) -> ir.Value:
    """Add the weight of each key to the sum at its clipped distance: [B,H,S,left+right+1]."""
    weights, left, right = node.weights, node.left, node.right
    queries = op.Unsqueeze(node.positions, [1, 3])
    distances = op.Sub(op.Unsqueeze(node.key_positions, [1, 2]), queries)
    index = op.Add(op.Clip(distances, -left, right), left)
    shape = op.Concat(op.Shape(weights, start=0, end=3), [left + right + 1], axis=0)
    zeros = op.Expand(op.constant(0, "float32"), shape)
    index = op.Expand(index, [1, size(node.output, 1), 1, 1])
    return op.ScatterElements(zeros, index, weights, axis=-1, reduction="add")


def rows_at_counts(op: Builder, node: RowsAtCounts) -> ir.Value:
    """Read rows [B,H,S,R] at the counts of all keys: [B,H,S,T]."""
    return _rows_at(op, _gates(op, node, node.keys, node.mask), node.rows)


def rows_at_last_counts(
    op: Builder, node: RowsAtCounts, append: Append, first: ir.Value, total: ir.Value
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


def attend_turned_keys(op: Builder, node: AttendTurnedKeys) -> ir.Value:
    """Attend with the keys as they are if no query of the call needs them turned."""
    last = op.ReduceMax(node.positions, keepdims=0)
    return op.choose(
        op.GreaterOrEqual(last, node.first_turned),
        lambda op: _attend_turned(op, node),
        lambda op: standard.attend(op, node),
    )


def _attend_turned(op: Builder, node: AttendTurnedKeys) -> ir.Value:
    """Attend with all keys turned for each query: [B,S,H*D]."""
    scores, mask = _products(op, node, _angles(op, node)), standard.in_float(op, node.mask)
    masked = op.Add(op.Mul(scores, op.constant(node.scale, "float32")), mask)
    weights = op.Softmax(op.Clip(masked, op.constant(standard.LEAST, "float32")), axis=-1)
    return standard.weighted_sum(op, node, weights, node.values)


def digits(op: Builder, node: AttendTurnedKeys) -> dict[str, ir.Value]:
    """Return the inputs turn_cos and turn_sin of CachedAttention, of the angles by which keys turn
    further for each query, at the distances d 16^l in row d + 16 l [B,S,16*digits,r/2].
    """
    count = 1
    while DIGITS**count < op.max_positions:
        count += 1
    distances = np.outer(DIGITS ** np.arange(count), np.arange(DIGITS)).reshape(-1, 1)
    drift = op.Unsqueeze(_drift(op, node), [2])
    angles = _in_radians(op, op.Mul(op.Cast(op.constant(distances), to=DOUBLE), drift))
    return {"turn_cos": op.Cos(angles), "turn_sin": op.Sin(angles)}


def _angles(op: Builder, node: AttendTurnedKeys) -> ir.Value:
    """Return the angles of all keys for all queries [B,1,S,T,r/2] float32."""
    queries = op.Unsqueeze(node.positions, [1, 3, 4])
    keys = op.Unsqueeze(node.key_positions, [1, 2, 4])
    distances = op.Cast(op.Sub(keys, queries), to=DOUBLE)
    drift = op.Unsqueeze(_drift(op, node), [1, 3])
    return _in_radians(op, op.Mul(distances, drift))


def _drift(op: Builder, node: AttendTurnedKeys) -> ir.Value:
    """Return by how many turns per position each pair of a key turns further for each query:
    [B,S,r/2] float64.
    """
    leading, rest = numbers_of(node.first), numbers_of(node.second)
    kept = min(node.first_turned, len(leading)) - 1  # the last row without a turn

    def turns() -> np.ndarray:
        frequencies = leading[kept:].astype(np.float64) + rest[kept:]
        return (frequencies - frequencies[0]) / (2 * np.pi)

    table = op.weight(f"{node.first.name}.turns", turns)
    return op.Gather(table, op.Max(op.Sub(node.positions, kept), 0))


def _in_radians(op: Builder, turns: ir.Value) -> ir.Value:
    """Convert turns of any size, float64, to angles within one turn, float32."""
    part = op.Cast(op.Sub(turns, op.Floor(turns)), to=FLOAT)
    return op.Mul(part, op.constant(2 * np.pi, "float32"))


def _products(op: Builder, node: AttendTurnedKeys, angles: ir.Value) -> ir.Value:
    """Rotate keys [B,K,T,D] by angles [B,1,S,T,r/2] for each query, as a batch [B*S,K,T,D] of
    RotaryEmbedding, and multiply them with that query: [B,H,S,T].
    """
    heads, kv_heads = node.heads, node.kv_heads
    head_size, half = size(node.q, 3), size(node.first, 1)
    q, keys = standard.in_float(op, node.q), standard.in_float(op, node.keys)
    queries, slots = op.Shape(q, start=1, end=2), op.Shape(keys, start=2, end=3)
    one, rest = op.constant([1]), op.constant([-1])
    for_each = op.Concat(one, queries, one, one, one, axis=0)
    repeated = op.Expand(op.Unsqueeze(keys, one), for_each)
    batch = op.Concat(rest, [kv_heads], slots, [head_size], axis=0)
    rows = op.Concat(rest, slots, [half], axis=0)
    waves = [op.Reshape(op.node(function, angles), rows) for function in ("Cos", "Sin")]
    partial = {"rotary_embedding_dim": 2 * half, "num_heads": kv_heads}
    partial = partial if 2 * half < head_size else {}
    pairs = {"interleaved": int(node.interleaved), **partial}
    rotated = op.RotaryEmbedding(op.Reshape(repeated, batch), *waves, **pairs)
    grouped = op.Reshape(q, [-1, kv_heads, heads // kv_heads, head_size])
    y = op.MatMul(grouped, op.Transpose(rotated, perm=[0, 1, 3, 2]))
    of_tokens = op.Shape(q, start=0, end=2)
    by_token = op.Reshape(y, op.Concat(of_tokens, [heads], slots, axis=0))
    return op.Transpose(by_token, perm=[0, 2, 1, 3])


def fused_delta(op: Builder, node: graph.GatedDelta) -> ir.Value:
    """Emit LinearAttention, which takes fewer heads of queries and keys than of values."""
    heads = [op.merge_heads(part) for part in (node.q, node.k, node.v)]
    y, state = op.several(
        2,
        "LinearAttention",
        *(*heads, node.state, node.decay, node.rate),
        domain=MICROSOFT,
        q_num_heads=node.kv_heads,
        kv_num_heads=node.heads,
        update_rule="gated_delta" if node.rate else "gated",
        scale=1.0,
    )
    _keep_state(node, state)
    return op.split_heads(y, node.heads)


def scanned(op: Builder, node: graph.GatedDelta) -> ir.Value:
    """Scan the tokens of a call, with the state between them."""
    sources = (_repeated(op, node, node.q), _repeated(op, node, node.k), node.v)
    q, k, v = (op.Unsqueeze(part, [3]) for part in sources)  # [B,S,H,1,D or V]
    decay, *rate = (  # [B,S,H,1 or D,1], [B,S,H,1,1]
        op.Unsqueeze(op.Reshape(part, [0, 0, node.heads, -1]), [4])
        for part in (node.decay, node.rate)
        if part
    )
    parts = (q, k, op.Transpose(k, perm=[0, 1, 2, 4, 3]), v, op.Exp(decay), *rate)
    over: Any = {"num_scan_inputs": len(parts), "scan_input_axes": [1] * len(parts)}
    body = _recurrence(op, len(parts))
    state, y = op.several(2, "Scan", node.state, *parts, body=body, scan_output_axes=[1], **over)
    _keep_state(node, state)
    return op.Squeeze(y, [3])


def _recurrence(op: Builder, count: int) -> ir.Graph:
    """The recurrence for one token, from the state [B,H,D,V] and `count` parts of the token."""
    state, *parts = (op.named() for _ in range(1 + count))
    q, k, column, v, decay, *rate = parts
    inside = op.empty()
    last = inside.Mul(state, decay)
    written = inside.Mul(rate[0], inside.Sub(v, inside.MatMul(k, last))) if rate else v
    last = inside.Add(last, inside.Mul(column, written))
    return inside.graph_of("token", [state, *parts], [last, inside.MatMul(q, last)])


def _keep_state(node: graph.GatedDelta, state: ir.Value) -> None:
    for reader in node.readers(LastHidden):
        reader.output.replace_all_uses_with(state, replace_graph_outputs=True)


def _repeated(op: Builder, node: graph.GatedDelta, value: ir.Value) -> ir.Value:
    """Repeat heads [...,K,D] of queries or keys for the heads of values: [...,H,D]."""
    if node.heads == node.kv_heads:
        return value
    index = np.repeat(np.arange(node.kv_heads), node.heads // node.kv_heads)
    return op.Gather(value, index, axis=2)
