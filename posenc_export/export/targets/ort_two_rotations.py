"""Target `ort`: keys in two rotations, in two caches, of which GroupQueryAttention reads one,
because it reads whole keys.

The queries of most calls use the same rotation; an If node then runs the GroupQueryAttention of
that rotation, and TensorScatter writes the new keys of the other one. In a call with queries of
both kinds, both nodes run for all queries.
"""

from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import ort_slots, two_rotations
from posenc_export.export.targets.builder import Builder, size
from posenc_export.export.targets.group_query import GroupQuery, padded, rotated
from posenc_export.ops.graph import Append, Attend, ChooseRotation, JoinRotations

CACHE = "far_key"  # name of the second cache of a layer


@dataclass(frozen=True)
class Heads:
    """Queries [B,S,H,D] and new keys [B,S,K,D] in a rotation, and the cache of keys [B,K,M,D]."""

    query: ir.Value
    key: ir.Value
    past: ir.Value


def query_of(op: Builder, node: Attend, append: Append) -> Optional[ChooseRotation]:
    """Return the ChooseRotation node of an Attend, and narrow the cache to keys of one rotation.
    None if there is no such node, or for caches that stay whole: those of an attention_mask, whose
    names other runtimes know, of float16, which was not measured, and of 8 bits, whose scales
    belong to whole keys.
    """
    query, key = ChooseRotation.of(node.q), JoinRotations.of(append.new)
    if (
        query is None
        or key is None
        or ort_slots.by_columns(op) is not None
        or op.dtype != "float32"
        or op.cache
    ):
        return None
    assert append.past.shape is not None
    append.past.shape = ir.Shape([*append.past.shape[:3], size(key.near, 3)])
    return query


def attend(
    op: Builder, call: GroupQuery, query: ChooseRotation, append: Append
) -> Tuple[ir.Value, ...]:
    """Attend with the rotation of each query. Return output [B,S,H*D], near keys and values; the
    far keys become a state of the graph.

    Args:
        query: from `query_of`.
    """
    key = JoinRotations.of(append.new)
    assert key is not None
    near = Heads(query.near, key.near, append.past)
    far = Heads(query.far, key.far, op.cache_beside(append.past, CACHE))
    slot, _ = ort_slots.written(op, append)

    def all_near(op: Builder) -> Sequence[ir.Value]:
        y, near_keys, values = call.emit(op, near.query, near.key, near.past)
        return y, near_keys, values, _scattered(op, call, far, slot)

    def all_far(op: Builder) -> Sequence[ir.Value]:
        y, far_keys, values = call.emit(op, far.query, far.key, far.past)
        return y, _scattered(op, call, near, slot), values, far_keys

    def mixed(op: Builder) -> Sequence[ir.Value]:
        y, near_keys, values = call.emit(op, near.query, near.key, near.past)
        y_far, far_keys, _ = call.emit(op, far.query, far.key, far.past)
        is_far = op.Unsqueeze(two_rotations.is_far_at(op, query, query.positions), [2])
        return op.Where(is_far, y_far, y), near_keys, values, far_keys

    last, first = _ends(op, query.positions)
    first_is_far, last_is_far = (
        two_rotations.is_far_at(op, query, position) for position in (first, last)
    )
    *outputs, far_keys = op.choose(
        last_is_far, lambda op: op.choose(first_is_far, all_far, mixed), all_near
    )
    op.add_cache(append.past, far.past, far_keys)
    return tuple(outputs)


def _ends(op: Builder, positions: ir.Value) -> Tuple[ir.Value, ir.Value]:
    """Return the largest and the smallest position of all tokens, []."""
    of_tokens = op.Where(op.Less(positions, 0), op.constant(np.iinfo(np.int64).max), positions)
    return op.ReduceMax(positions, keepdims=0), op.ReduceMin(of_tokens, keepdims=0)


def _scattered(op: Builder, call: GroupQuery, heads: Heads, slot: ir.Value) -> ir.Value:
    """Write new keys, rotated as the operator does, into their cache from slots [B] on."""
    by_slot = call.rotation(heads.query, heads.key) is not None
    turned = rotated(op, heads.key, ort_slots.cache_position(op) if by_slot else None)
    return op.TensorScatter(
        heads.past, op.Transpose(padded(op, turned, call.wide), perm=[0, 2, 1, 3]), slot, axis=2
    )
