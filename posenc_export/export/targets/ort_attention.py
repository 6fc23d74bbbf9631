"""Target `ort`: attention over cached keys and values as GroupQueryAttention where it can represent it, as standard operators elsewhere."""

from typing import Optional, Sequence, Tuple

import onnx_ir as ir

from posenc_export.export.targets import ort_slots, ort_turned_keys, ort_two_rotations, standard, turned_keys
from posenc_export.export.targets.group_query import GroupQuery, group_query
from posenc_export.export.targets.rewriter import Rewriter, number, producer, size


def attend(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Emit GroupQueryAttention if no other node reads the appended keys and values, otherwise standard attention over the valid slots."""
    appended = standard.appended_here(node)
    if appended is None or not _fits(rewriter, node):
        return standard.attend(rewriter, node)
    append_key, append_value = appended
    query_of_two = ort_two_rotations.query_of(rewriter, node, append_key)
    call = group_query(rewriter, node, append_key, append_value)
    made = _attended(call, node, append_key) if query_of_two is None else ort_two_rotations.attend(call, query_of_two, append_key)
    return _finished(call, node, appended, made)


def attend_turned(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Emit GroupQueryAttention in compact rows in float32. Caches of 8 bits cannot be turned."""
    appended = standard.appended_here(node)
    if appended is None or ort_slots.by_columns(rewriter) is not None or rewriter.dtype != "float32" or rewriter.cache or _in_chunks(node):
        return turned_keys.attend(rewriter, node)
    call = group_query(rewriter, node, *appended)
    return _finished(call, node, appended, ort_turned_keys.attend(call, node, appended[0]))


def _finished(call: GroupQuery, node: ir.Node, appended: Tuple[ir.Node, ir.Node], made: Sequence[ir.Value]) -> ir.Value:
    """Return y [B,S,H*D] of tokens, from output, keys and values with the head size of GroupQueryAttention, which replace the outputs of the Append nodes."""
    y, *presents = made
    for append, present in zip(appended, presents, strict=True):
        append.outputs[0].replace_all_uses_with(present, replace_graph_outputs=True)
    values = size(appended[1].inputs[1], 3)
    if values < call.wide:
        y = _first_of_heads(call.rewriter, y, number(node, "heads"), values)
    return y if call.compact else _at_tokens(call.rewriter, y, node.inputs[3])


def _fits(rewriter: Rewriter, node: ir.Node) -> bool:
    """Return whether GroupQueryAttention can represent the node. In float16, content scores may exceed the range of its bias."""
    return standard.content_of(node) is None or rewriter.dtype == "float32"


def _attended(call: GroupQuery, node: ir.Node, append_key: ir.Node) -> Tuple[ir.Value, ...]:
    """Return output, keys and values of one GroupQueryAttention. A reader of the softmax reads the output of that node."""
    reader = standard.shares_of(node)
    past_key, new_key = append_key.inputs[:2]
    made = call.emit(node.inputs[0], new_key, past_key, with_shares=reader is not None)
    if reader is not None:
        written = _sees_all(call, node) and _reads_slots(call.rewriter, reader)
        reader.outputs[0].replace_all_uses_with(made[3] if written else _where_seen(call.rewriter, made[3], node.inputs[3]))
    return made[:3]


def _in_chunks(node: ir.Node) -> bool:
    """Return whether a query sees the keys of its chunk alone, which GroupQueryAttention cannot represent."""
    mask = producer(node.inputs[3], "Mask")
    return mask is not None and number(mask, "chunk") > 0


def _sees_all(call: GroupQuery, node: ir.Node) -> bool:
    """Return whether a query sees every slot up to its own."""
    mask = producer(node.inputs[3], "Mask")
    return call.compact and mask is not None and number(mask, "before") < 0 and not number(mask, "chunk")


def _reads_slots(rewriter: Rewriter, shares: ir.Node) -> bool:
    """Return whether only shares of keys up to the query are read, which GroupQueryAttention always writes."""
    users = [user for user, _ in shares.outputs[0].uses()]
    return all(user.op_type == "CollectByDistance" and number(user, "left") and ort_slots.in_slots(rewriter, user.inputs[2]) for user in users)


def _where_seen(rewriter: Rewriter, shares: ir.Value, mask: Optional[ir.Value]) -> ir.Value:
    """Set the shares [B,H,S,T] of keys that a query does not see to 0: GroupQueryAttention leaves the entries past the end of a shorter row unwritten."""
    seen = rewriter.emit("Greater", [mask, rewriter.constant(standard.LEAST, "float32")])
    return rewriter.emit("Where", [seen, shares, rewriter.constant(0, "float32")])


def _first_of_heads(rewriter: Rewriter, y: ir.Value, heads: int, count: int) -> ir.Value:
    """Take the first `count` entries of each head of y [B,S,H*D]."""
    by_head = rewriter.emit("Reshape", [y, rewriter.constant([0, 0, heads, -1])])
    first = rewriter.emit("Slice", [by_head, rewriter.constant([0]), rewriter.constant([count]), rewriter.constant([3])])
    return rewriter.packed(first)


def _at_tokens(rewriter: Rewriter, y: ir.Value, mask: Optional[ir.Value]) -> ir.Value:
    """Set y [B,S,H*D] to 0 at padding. Padding sees no key, and the softmax over -inf only gives NaN."""
    semantic_mask = producer(mask, "Mask")
    assert semantic_mask is not None
    token = rewriter.emit("GreaterOrEqual", [rewriter.emit("Unsqueeze", [semantic_mask.inputs[0], rewriter.constant([2])]), rewriter.constant(0)])
    return rewriter.emit("Where", [token, y, rewriter.constant(0, rewriter.dtype)])
