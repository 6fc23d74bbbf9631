"""Target `ort`: attention over cached keys as GroupQueryAttention where that is exact."""

from typing import Sequence, Tuple

import onnx_ir as ir

from posenc_export.export.targets import (
    ort_slots,
    ort_turned_keys,
    ort_two_rotations,
    standard,
    turned_keys,
)
from posenc_export.export.targets.builder import Builder, size
from posenc_export.export.targets.group_query import GroupQuery, group_query
from posenc_export.ops.graph import (
    Append,
    Attend,
    AttendTurnedKeys,
    AttentionWeights,
    CollectByDistance,
    Mask,
)


def attend(op: Builder, node: Attend) -> ir.Value:
    """Emit GroupQueryAttention if no other node reads the appended keys and values, otherwise
    standard attention over the valid slots.

    In float16, content scores may exceed the range of its bias.
    """
    appended = standard.appended_here(node)
    if appended is None or (node.content is not None and op.dtype != "float32"):
        return standard.attend(op, node)
    key, value = appended
    query = ort_two_rotations.query_of(op, node, key)
    call = group_query(op, node, key, value)
    outputs = (
        _attended(op, call, node, key)
        if query is None
        else ort_two_rotations.attend(op, call, query, key)
    )
    y = finished(op, node, appended, outputs, call.wide)
    return y if call.compact else _at_tokens(op, y, node.mask)


def attend_turned(op: Builder, node: AttendTurnedKeys) -> ir.Value:
    """Emit GroupQueryAttention in compact float32 rows, not for 8-bit caches or chunks."""
    appended, mask = standard.appended_here(node), Mask.of(node.mask)
    in_chunks = mask is not None and mask.chunk > 0
    if (
        appended is None
        or ort_slots.by_columns(op) is not None
        or op.dtype != "float32"
        or op.cache
        or in_chunks
    ):
        return turned_keys.attend(op, node)
    call = group_query(op, node, *appended)
    outputs = ort_turned_keys.attend(op, call, node, appended[0])
    return finished(op, node, appended, outputs, call.wide)


def finished(
    op: Builder,
    node: Attend,
    appended: Tuple[Append, Append],
    outputs: Sequence[ir.Value],
    wide: int,
) -> ir.Value:
    """Return y [B,S,H*D] from output, keys and values with heads of size `wide`, which replace the
    outputs of the Append nodes.
    """
    y, *presents = outputs
    for append, present in zip(appended, presents, strict=True):
        append.output.replace_all_uses_with(present, replace_graph_outputs=True)
    values = size(appended[1].new, 3)
    if values < wide:
        by_head = op.Reshape(y, [0, 0, node.heads, -1])
        y = op.merge_heads(op.Slice(by_head, [0], [values], [3]))
    return y


def _attended(op: Builder, call: GroupQuery, node: Attend, key: Append) -> Tuple[ir.Value, ...]:
    """Return output, keys and values of a node, which a reader of the softmax reads too."""
    readers = node.readers(AttentionWeights)
    outputs = call.emit(op, node.q, key.new, key.past, with_weights=bool(readers))
    for reader in readers:
        written = _sees_all(call, node) and _reads_slots(op, reader)
        reader.output.replace_all_uses_with(
            outputs[3] if written else _where_seen(op, outputs[3], node.mask)
        )
    return outputs[:3]


def _sees_all(call: GroupQuery, node: Attend) -> bool:
    """Return whether a query sees every slot up to its own."""
    mask = Mask.of(node.mask)
    return call.compact and mask is not None and mask.before < 0 and not mask.chunk


def _reads_slots(op: Builder, weights: AttentionWeights) -> bool:
    """Return whether only weights up to the query are read, which the node always writes."""
    readers = weights.readers(CollectByDistance)
    return len(readers) == len(weights.output.uses()) and all(
        reader.left and ort_slots.in_slots(op, reader.key_positions) for reader in readers
    )


def _where_seen(op: Builder, weights: ir.Value, mask: ir.Value) -> ir.Value:
    """Set weights of hidden keys to 0; the node leaves those past a row's end unwritten."""
    seen = op.Greater(mask, op.constant(standard.LEAST, "float32"))
    return op.Where(seen, weights, op.constant(0, "float32"))


def _at_tokens(op: Builder, y: ir.Value, mask: ir.Value) -> ir.Value:
    """Set y [B,S,H*D] to 0 at padding, which sees no key and has NaN there."""
    semantic_mask = Mask.of(mask)
    assert semantic_mask is not None
    token = op.GreaterOrEqual(op.Unsqueeze(semantic_mask.positions, [2]), 0)
    return op.Where(token, y, op.constant(0, op.dtype))
