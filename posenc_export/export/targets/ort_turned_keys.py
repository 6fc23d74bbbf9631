"""Target `ort`: ops.turned_keys.attend in compact rows, by GroupQueryAttention as far as it can.

The operator takes the calls in which no query needs the keys turned. In other calls, standard
operators write both caches in place and compute the scores.

Slots of compact rows have consecutive positions. The key in slot b J + j is turned for the query in
slot c by (b J + j - c) d. The angles j d are the same in all blocks b, and the rest of the angle
turns the query instead. Keys are cached with the two entries of a pair side by side, so that
RotaryEmbedding rotates a block as one long row: its time for a row is that of about a hundred
entries.

Shapes: W head size of the caches, G query heads of a kv head, n blocks.
"""

from typing import List, Sequence, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import ort_slots, standard, turned_keys
from posenc_export.export.targets.builder import DOUBLE, Builder, size
from posenc_export.export.targets.group_query import GroupQuery, padded, rotated
from posenc_export.ops import graph
from posenc_export.ops.graph import Append, AttendTurnedKeys, Mask, Rotate

# J: with more keys, more slots after the last token are read; with fewer, rows are shorter.
BLOCK = 128


def attend(
    op: Builder, call: GroupQuery, node: AttendTurnedKeys, key: Append
) -> Tuple[ir.Value, ...]:
    """Return output [B,S,H*D], keys and values."""
    # If products of positions and frequencies are rounded, angles do not depend on distances alone.
    in_blocks = node.second is not None and (
        node.interleaved or all(Rotate.of(value) for value in (node.q, key.new))
    )
    q, new = (_side_by_side(op, value) if in_blocks else value for value in (node.q, key.new))

    def within(op: Builder) -> Sequence[ir.Value]:
        return call.emit(op, q, new, key.past)

    def beyond(op: Builder) -> Sequence[ir.Value]:
        query, keys, values, total = _written(op, call, node, key, (q, new))
        if in_blocks:
            scores = _scores_in_blocks(op, node, query, keys, total)
        else:
            scores = turned_keys.products(
                op, node, query, op.Slice(keys, [0], total, [2]), turned_keys.angles(op, node)
            )
        mask = Mask.of(node.mask)
        assert mask is not None
        visible = standard.mask_at(op, mask, ort_slots.key_positions(op))
        return (
            turned_keys.weighted(op, node, scores, visible, op.Slice(values, [0], total, [2])),
            keys,
            values,
        )

    return op.choose(turned_keys.any_turns(op, node), beyond, within)


def _written(
    op: Builder,
    call: GroupQuery,
    node: AttendTurnedKeys,
    key: Append,
    new: Tuple[ir.Value, ir.Value],
) -> Tuple[ir.Value, ...]:
    """Rotate and write: queries [B,S,H,W], keys and values [B,K,M,W], number of valid slots [1]."""
    first, total = ort_slots.written(op, key)
    slots = ort_slots.cache_position(op) if call.rotation(*new) else None
    # In this branch only, as the mask.
    value = _like(call.new_value, op.split_heads(op.merge_heads(call.new_value), node.kv_heads))
    query, *parts = (
        padded(op, part, call.wide)
        for part in (*(rotated(op, heads, slots) for heads in new), value)
    )
    pasts = key.past, call.past_value
    keys, values = (
        op.TensorScatter(past, op.Transpose(part, perm=[0, 2, 1, 3]), first, axis=2)
        for past, part in zip(pasts, parts, strict=True)
    )
    return query, keys, values, total


def _scores_in_blocks(
    op: Builder, node: AttendTurnedKeys, q: ir.Value, keys: ir.Value, total: ir.Value
) -> ir.Value:
    """Scores [B,H,S,T] of queries [B,S,H,W] with the first T of keys [B,K,M,W], both with the
    entries of pairs side by side.

    Args:
        total: T [1].
    """
    assert node.second is not None
    wide = size(q, 3)
    end = op.Mul(op.Div(op.Add(total, [BLOCK - 1]), [BLOCK]), [BLOCK])
    # Negative where the cache has further slots, which Pad then leaves out.
    missing = op.Mul(op.Sub(end, op.Shape(keys, start=2, end=3)), [wide])
    flat = op.Pad(op.Reshape(keys, [0, 0, -1]), op.Concat([0], missing, axis=0), None, [2])
    rows = op.Reshape(flat, [0, -1, 1, BLOCK * wide])
    drift = op.Unsqueeze(turned_keys.drift(op, node, node.second, wide // 2), [2])
    starts = op.Range(op.constant(0), op.Squeeze(end), op.constant(BLOCK))
    to_starts = op.Sub(op.Unsqueeze(ort_slots.cache_position(op), [2]), starts)
    waves = [
        wave
        for distances in (to_starts, op.constant(np.arange(BLOCK)))
        for wave in _waves(op, distances, drift)
    ]

    def of_token(op: Builder, query: ir.Value, *waves: ir.Value) -> ir.Value:
        return _products(op, query, rows, waves[:2], waves[2:], node.kv_heads)

    return op.Slice(op.for_each([q, *waves], 1, of_token, 2), [0], total, [3])


def _products(
    op: Builder,
    q: ir.Value,
    rows: ir.Value,
    of_q: Sequence[ir.Value],
    of_keys: Sequence[ir.Value],
    kv_heads: int,
) -> ir.Value:
    """Scores [B,H,n*J] of the queries of one token with blocks of keys.

    Shapes: q [B,H,W], rows [B,K*n,1,J*W]; cos and sin [B,n,W/2] of q, [B,J,W/2] of keys.
    """
    count = op.Shape(of_q[0], start=1, end=2)
    for_blocks = op.Expand(op.Unsqueeze(q, [2]), op.Concat([1, 1], count, [1], axis=0))
    queries = op.RotaryEmbedding(for_blocks, *of_q, interleaved=1)
    of_head = op.Transpose(
        op.Reshape(queries, op.Concat([0, kv_heads, -1], count, op.Shape(q, start=2), axis=0)),
        perm=[0, 1, 3, 2, 4],
    )
    keys = op.RotaryEmbedding(
        rows, *(op.Reshape(wave, [0, 1, -1]) for wave in of_keys), interleaved=1
    )
    blocks = op.Reshape(keys, op.Concat([0, kv_heads], count, [BLOCK, -1], axis=0))
    y = op.MatMul(of_head, op.Transpose(blocks, perm=[0, 1, 2, 4, 3]))  # [B,K,n,G,J]
    return op.Reshape(
        op.Transpose(y, perm=[0, 1, 3, 2, 4]), op.Concat(op.Shape(q, start=0, end=2), [-1], axis=0)
    )


def _waves(op: Builder, distances: ir.Value, drift: ir.Value) -> List[ir.Value]:
    """Cosine and sine [B,S,N,W/2] of turns by distances, [N] or [B,S,N], and drift [B,S,1,W/2]."""
    angles = turned_keys.in_radians(
        op, op.Mul(op.Unsqueeze(op.Cast(distances, to=DOUBLE), [-1]), drift)
    )
    return [op.Cos(angles), op.Sin(angles)]


def _side_by_side(op: Builder, value: ir.Value) -> ir.Value:
    """Put both entries of a pair of rotated heads [B,S,N,D] side by side."""
    rotation = Rotate.of(value)
    if rotation is None or rotation.interleaved:
        return value
    heads, head_size, rotary = size(value, 2), size(value, 3), 2 * size(rotation.cos, 1)
    pairs = np.concatenate(
        (np.arange(rotary).reshape(2, -1).T.ravel(), np.arange(rotary, head_size))
    )
    entries = (pairs + head_size * np.arange(heads)[:, None]).ravel()
    x = _like(value, op.split_heads(op.Gather(op.merge_heads(rotation.x), entries, axis=2), heads))
    tables = rotation.positions, rotation.cos, rotation.sin
    return _like(
        value,
        op.Rotate(x, *tables, domain=graph.DOMAIN, interleaved=1.0, linear=float(rotation.linear)),
    )


def _like(x: ir.Value, value: ir.Value) -> ir.Value:
    """Give a value shape and dtype of another one, and return it."""
    value.shape, value.type = x.shape, x.type
    return value
