"""Lowerings of ops/by_query.py to standard operators."""

from typing import List

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import standard
from posenc_export.export.targets.builder import DOUBLE, FLOAT, Builder, numbers_of, size
from posenc_export.ops.graph import AttendTurnedKeys

DIGITS = 16  # numbers of a digit of a distance (packages/kernels)


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


def digits(op: Builder, node: AttendTurnedKeys) -> List[ir.Value]:
    """Return the cosines and sines of the angles by which keys turn further for each query, at the
    distances d 16^l in row d + 16 l [B,S,16*digits,r/2].
    """
    count = 1
    while DIGITS**count < op.max_positions:
        count += 1
    distances = np.outer(DIGITS ** np.arange(count), np.arange(DIGITS)).reshape(-1, 1)
    drift = op.Unsqueeze(_drift(op, node), [2])
    angles = _in_radians(op, op.Mul(op.Cast(op.constant(distances), to=DOUBLE), drift))
    return [op.Cos(angles), op.Sin(angles)]


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
