"""Target `ort`: keys in two rotations, in two caches, of which GroupQueryAttention reads one, because it reads whole keys.

The queries of most calls use the same rotation; an If node then runs the GroupQueryAttention of that rotation, and TensorScatter writes the new keys of the other one.
In a call with queries of both kinds, both nodes run for all queries.
"""

from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import ort_slots, two_rotations
from posenc_export.export.targets.group_query import GroupQuery, padded, rotated
from posenc_export.export.targets.rewriter import Rewriter, producer, size

CACHE = "far_key"  # name of the second cache of a layer


@dataclass(frozen=True)
class Heads:
    """Queries [B,S,H,D] and new keys [B,S,K,D] in one rotation, and the cache of the keys [B,K,M,D].

    Args:
        query, key: outputs of Rotate nodes.
        past: input of the graph.
    """

    query: Optional[ir.Value]
    key: Optional[ir.Value]
    past: ir.Value


def query_of(rewriter: Rewriter, node: ir.Node, append_key: ir.Node) -> Optional[ir.Node]:
    """Return the ChooseRotation node of an Attend, and narrow the cache to keys of one rotation. None if there is no such node, or for caches that stay whole:
    those of an attention_mask, whose names other runtimes know, of float16, which was not measured, and of 8 bits, whose scales belong to whole keys."""
    query, key = producer(node.inputs[0], "ChooseRotation"), producer(append_key.inputs[1], "JoinRotations")
    if query is None or key is None or ort_slots.by_columns(rewriter) is not None or rewriter.dtype != "float32" or rewriter.cache:
        return None
    past = append_key.inputs[0]
    assert past is not None and past.shape is not None
    past.shape = ir.Shape([*past.shape[:3], size(key.inputs[0], 3)])
    return query


def attend(call: GroupQuery, query: ir.Node, append_key: ir.Node) -> Tuple[ir.Value, ...]:
    """Attend with the rotation of each query. Return output [B,S,H*D], near keys and values; the far keys become a state of the graph.

    Args:
        query: from `query_of`.
    """
    rewriter, past, new = call.rewriter, append_key.inputs[0], producer(append_key.inputs[1], "JoinRotations")
    assert past is not None and new is not None
    near, far = Heads(query.inputs[0], new.inputs[0], past), Heads(query.inputs[1], new.inputs[1], rewriter.cache_beside(past, CACHE))
    slot, _ = ort_slots.written(rewriter, append_key)

    def of_near() -> Sequence[ir.Value]:
        y, near_keys, values = call.emit(near.query, near.key, near.past)
        return y, near_keys, values, _scattered(call, far, slot)

    def of_far() -> Sequence[ir.Value]:
        y, far_keys, values = call.emit(far.query, far.key, far.past)
        return y, _scattered(call, near, slot), values, far_keys

    def of_both() -> Sequence[ir.Value]:
        y, near_keys, values = call.emit(near.query, near.key, near.past)
        y_far, far_keys, _ = call.emit(far.query, far.key, far.past)
        is_far = rewriter.emit("Unsqueeze", [two_rotations.is_far_at(rewriter, query, query.inputs[2]), rewriter.constant([2])])
        return rewriter.emit("Where", [is_far, y_far, y]), near_keys, values, far_keys

    last, first = _ends(rewriter, query.inputs[2])
    first_is_far, last_is_far = (two_rotations.is_far_at(rewriter, query, position) for position in (first, last))
    *found, far_keys = rewriter.choose(last_is_far, lambda: rewriter.choose(first_is_far, of_far, of_both), of_near)
    rewriter.add_cache(past, far.past, far_keys)
    return tuple(found)


def _ends(rewriter: Rewriter, positions: Optional[ir.Value]) -> Tuple[ir.Value, ir.Value]:
    """Return the largest and the smallest position of all tokens, []. Padding, at -1, is left out of the smallest."""
    whole = {"keepdims": 0}
    of_tokens = rewriter.emit("Where", [rewriter.emit("Less", [positions, rewriter.constant(0)]), rewriter.constant(np.iinfo(np.int64).max), positions])
    return rewriter.emit("ReduceMax", [positions], attributes=whole), rewriter.emit("ReduceMin", [of_tokens], attributes=whole)


def _scattered(call: GroupQuery, heads: Heads, slot: ir.Value) -> ir.Value:
    """Write new keys into their cache, rotated as GroupQueryAttention rotates them, from slots [B] on."""
    by_slot = call.rotation(heads.query, heads.key) is not None
    turned = rotated(call.rewriter, heads.key, ort_slots.cache_position(call.rewriter) if by_slot else None)
    update = call.rewriter.emit("Transpose", [padded(call.rewriter, turned, call.wide)], attributes={"perm": [0, 2, 1, 3]})
    return call.rewriter.emit("TensorScatter", [heads.past, update, slot], attributes={"axis": 2})
