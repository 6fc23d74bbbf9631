"""Target `ort`: com.microsoft GroupQueryAttention with shared buffers and cost O(valid length); standard operators elsewhere.

With position_ids, rows are compact: the tokens of a row fill its first slots. Differences of slots are then differences of positions, and GroupQueryAttention can
rotate by slot, which is exact for any offset. With attention_mask, a slot is a column of the mask: keys are rotated before the node, and the mask is added as a bias.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import onnx_ir as ir

from posenc_export.export.rewriter import Rewriter, number, producer, size
from posenc_export.export.targets import collected, counts, standard, turned, waves

DOMAIN = "com.microsoft"
AFTER_SOFTMAX = 2  # value of the attribute qk_output
INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def by_columns(rewriter: Rewriter) -> Optional[ir.Value]:
    """Return the input attention_mask if slots are columns, or None if rows are compact."""
    return next((value for value in rewriter.graph.inputs if value.name == "attention_mask"), None)


def lengths(rewriter: Rewriter) -> Tuple[ir.Value, ir.Value]:
    """Return the inputs seqlens_k [B] int32, valid tokens of each row minus 1, and total_sequence_length [] int32, valid tokens of the longest row."""
    return rewriter.input("seqlens_k", INT32, ["batch_size"]), rewriter.input("total_sequence_length", INT32, [])


def lengths_of_mask(rewriter: Rewriter, attention_mask: ir.Value) -> Tuple[ir.Value, ir.Value]:
    """Return the two values of `lengths` for an attention_mask, of which every column is a slot."""
    total = rewriter.emit("Cast", [rewriter.emit("Shape", [attention_mask], attributes={"start": 1, "end": 2})], attributes={"to": int(INT32)})
    last = rewriter.emit("Sub", [total, rewriter.constant([1], "int32")])
    rows = rewriter.emit("Expand", [last, rewriter.emit("Shape", [attention_mask], attributes={"start": 0, "end": 1})])
    return rows, rewriter.emit("Squeeze", [total])


def _cache_position(rewriter: Rewriter) -> ir.Value:
    """Return the input cache_position [B,S] int64: the slot of each new token, in compact rows."""
    return rewriter.input("cache_position", INT64, ["batch_size", "sequence_length"])


def append_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Key positions of compact rows: the input first_position [B,1], which is the position in slot 0, plus the slot."""
    slots = rewriter.emit("Range", [rewriter.constant(0), _total(rewriter), rewriter.constant(1)])
    return rewriter.emit("Add", [_first_position(rewriter), slots])


def _total(rewriter: Rewriter) -> ir.Value:
    """Return the number of valid slots of the longest compact row, [] int64."""
    return rewriter.emit("Cast", [lengths(rewriter)[1]], attributes={"to": int(INT64)})


def _first_position(rewriter: Rewriter) -> ir.Value:
    """Return the position in slot 0 of each compact row [B,1]."""
    return rewriter.input("first_position", INT64, ["batch_size", 1])


def _of_call(rewriter: Rewriter, key_positions: Optional[ir.Value]) -> bool:
    """Return whether the keys are not in slots of compact rows: with attention_mask, or without a cache."""
    return by_columns(rewriter) is not None or (key_positions is not None and key_positions.is_graph_input())


def _in_slots(rewriter: Rewriter, key_positions: Optional[ir.Value]) -> bool:
    """Return whether a lowering may find keys by slot instead of by position. Float16 was not measured."""
    return rewriter.dtype == "float32" and not _of_call(rewriter, key_positions)


def wave_products(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Use that slots of compact rows have consecutive positions."""
    if not _in_slots(rewriter, node.inputs[1]):
        return waves.wave_products(rewriter, node)
    return waves.consecutive_wave_products(rewriter, node, _first_position(rewriter), _total(rewriter))


def distances(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Subtract slots of queries from slots of keys, for compact rows. It is exact in float32 below 2^24 slots and takes fewer nodes than positions in int64."""
    if _of_call(rewriter, node.inputs[1]):
        return standard.distances(rewriter, node)
    _, total = lengths(rewriter)
    count = rewriter.emit("Cast", [total], attributes={"to": int(ir.DataType.FLOAT)})
    slots = rewriter.emit("Range", [rewriter.constant(0, "float32"), count, rewriter.constant(1, "float32")])
    queries = rewriter.emit("Cast", [_cache_position(rewriter)], attributes={"to": int(ir.DataType.FLOAT)})
    return rewriter.emit("Sub", [slots, rewriter.emit("Unsqueeze", [queries, rewriter.constant([1, 3])])])


def attend(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Emit GroupQueryAttention if no other node reads the appended keys and values, otherwise standard attention over the valid slots."""
    appended = standard.appended_here(node)
    if appended is None or not _fits(rewriter, node):
        return standard.attend(rewriter, node)
    append_key, append_value = appended
    q, attention_mask = node.inputs[0], by_columns(rewriter)
    semantic_mask = producer(node.inputs[3], "Mask")
    assert semantic_mask is not None and not number(semantic_mask, "after")  # models with a cache are causal
    if attention_mask is not None:
        (seqlens, total), seen, rotation = lengths_of_mask(rewriter, attention_mask), None, None
    else:
        seqlens, total = lengths(rewriter)
        seen, rotation = _seen(semantic_mask), _rotation(q, append_key.inputs[1])
    content = standard.content_of(node)
    if seen is None:
        bias = _sum(rewriter, [node.inputs[3], content])
    else:
        bias = _in_dtype(rewriter, _sum(rewriter, [semantic_mask.inputs[2], content]))
    sources, tables, turned = _turned(rewriter, [q, append_key.inputs[1], append_value.inputs[1]], rotation)
    values, wide = size(append_value.inputs[0], 3), _widened(append_key, append_value)
    sources = [_padded(rewriter, value, wide) for value in sources]
    attributes = {"num_heads": number(node, "heads"), "kv_num_heads": number(node, "kv_heads"), **standard.scores_of(node), **(seen or {}), **turned}
    reader = standard.shares_of(node)
    inputs = [*_projections(rewriter, sources), append_key.inputs[0], append_value.inputs[0], seqlens, total, *tables, None, bias, standard.sinks_of(node)]
    attributes |= {} if reader is None else {"qk_output": AFTER_SOFTMAX}
    y, present_key, present_value, *shares = rewriter.emit_all("GroupQueryAttention", inputs, 3 if reader is None else 4, DOMAIN, attributes)
    if reader is not None:
        found = shares[0] if seen == {} and _reads_slots(rewriter, reader) else _where_seen(rewriter, shares[0], node.inputs[3])
        reader.outputs[0].replace_all_uses_with(found)
    append_key.outputs[0].replace_all_uses_with(present_key, replace_graph_outputs=True)
    append_value.outputs[0].replace_all_uses_with(present_value, replace_graph_outputs=True)
    if values < wide:
        y = _first_of_heads(rewriter, y, number(node, "heads"), values)
    return y if attention_mask is None else _at_tokens(rewriter, y, semantic_mask.inputs[0])


def collect_by_distance(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Use that differences of slots of compact rows are distances."""
    if _in_slots(rewriter, node.inputs[2]) and number(node, "left"):
        return collected.collect_from_slots(rewriter, node, _cache_position(rewriter))
    return collected.collect_by_distance(rewriter, node)


def _fits(rewriter: Rewriter, node: ir.Node) -> bool:
    """Return whether GroupQueryAttention can represent the node. In float16, content scores may exceed the range of its bias."""
    return standard.content_of(node) is None or rewriter.dtype == "float32"


def _turned(
    rewriter: Rewriter, sources: List[Optional[ir.Value]], rotation: Optional[ir.Node]
) -> Tuple[List[Optional[ir.Value]], List[Optional[ir.Value]], Dict[str, Any]]:
    """Return queries, keys and values for GroupQueryAttention, its tables of cos and sin, and its rotation attributes.

    With `rotation`, the node rotates queries and keys; without, they are rotated before it.
    """
    if rotation is None:
        return [_rotated(rewriter, value) for value in sources], [None, None], {}
    tables = [rewriter.table(rotation.inputs[2]), rewriter.table(rotation.inputs[3])]  # type: ignore[arg-type]
    unturned = [rotated.inputs[0] if (rotated := producer(value, "Rotate")) else value for value in sources]
    return unturned, list(tables), {"do_rotary": 1, "rotary_interleaved": number(rotation, "interleaved")}


def _widened(append_key: ir.Node, append_value: ir.Node) -> int:
    """Widen both caches to the head size of GroupQueryAttention, and return it. It is a multiple of 8, and the same for keys and values."""
    caches = [append_key.inputs[0], append_value.inputs[0]]
    wide = -(-max(size(past, 3) for past in caches) // 8) * 8
    for past in caches:
        assert past is not None and past.shape is not None
        past.shape = ir.Shape([*past.shape[:3], wide])
    return wide


def _padded(rewriter: Rewriter, value: Optional[ir.Value], wide: int) -> Optional[ir.Value]:
    """Pad heads [B,S,N,D] with zeros to [B,S,N,wide]."""
    missing = wide - size(value, 3)
    if not missing:
        return value
    return rewriter.emit("Pad", [value, rewriter.constant([0, missing]), rewriter.constant(0, rewriter.dtype), rewriter.constant([3])])


def _reads_slots(rewriter: Rewriter, shares: ir.Node) -> bool:
    """Return whether only shares of keys up to the query are read, which GroupQueryAttention always writes."""
    users = [user for user, _ in shares.outputs[0].uses()]
    return all(user.op_type == "CollectByDistance" and number(user, "left") and _in_slots(rewriter, user.inputs[2]) for user in users)


def _where_seen(rewriter: Rewriter, shares: ir.Value, mask: Optional[ir.Value]) -> ir.Value:
    """Set the shares [B,H,S,T] of keys that a query does not see to 0: GroupQueryAttention leaves the entries past the end of a shorter row unwritten."""
    seen = rewriter.emit("Greater", [mask, rewriter.constant(standard.LEAST, "float32")])
    return rewriter.emit("Where", [seen, shares, rewriter.constant(0, "float32")])


def _first_of_heads(rewriter: Rewriter, y: ir.Value, heads: int, count: int) -> ir.Value:
    """Take the first `count` entries of each head of y [B,S,H*D]."""
    by_head = rewriter.emit("Reshape", [y, rewriter.constant([0, 0, heads, -1])])
    first = rewriter.emit("Slice", [by_head, rewriter.constant([0]), rewriter.constant([count]), rewriter.constant([3])])
    return rewriter.packed(first)


def _seen(mask: ir.Node) -> Optional[Dict[str, int]]:
    """Return the attributes of GroupQueryAttention that replace the mask for compact rows, or None if it needs the mask. A window includes the query itself."""
    before = number(mask, "before")
    if number(mask, "chunk"):
        return None
    return {} if before < 0 else {"local_window_size": before + 1}


def _at_tokens(rewriter: Rewriter, y: ir.Value, positions: Optional[ir.Value]) -> ir.Value:
    """Set y [B,S,H*D] to 0 at padding. Padding sees no key, and the softmax over -inf only gives NaN."""
    token = rewriter.emit("GreaterOrEqual", [rewriter.emit("Unsqueeze", [positions, rewriter.constant([2])]), rewriter.constant(0)])
    return rewriter.emit("Where", [token, y, rewriter.constant(0, rewriter.dtype)])


def _sum(rewriter: Rewriter, scores: Sequence[Optional[ir.Value]]) -> Optional[ir.Value]:
    """Add the scores that are not None."""
    there = [value for value in scores if value is not None]
    if not there:
        return None
    return there[0] if len(there) == 1 else rewriter.emit("Add", there)


def _in_dtype(rewriter: Rewriter, scores: Optional[ir.Value]) -> Optional[ir.Value]:
    return None if scores is None else standard.in_dtype(rewriter, scores)


def append(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Write new keys or values into the buffer in place, and return the whole buffer. Nodes that read all slots get a slice of the valid ones."""
    past, new, _ = node.inputs
    first, total = _slots(rewriter, node)
    update = rewriter.emit("Transpose", [new], attributes={"perm": [0, 2, 1, 3]})
    buffer = rewriter.emit("TensorScatter", [past, update, first], attributes={"axis": 2})
    valid = rewriter.emit("Slice", [buffer, rewriter.constant([0]), total, rewriter.constant([2])])
    for reader, index in list(node.outputs[0].uses()):
        if reader.op_type != "GatherElements":  # which reads only the slots it is given
            reader.replace_input_with(index, valid)
    return buffer


def _slots(rewriter: Rewriter, append: ir.Node) -> Tuple[ir.Value, ir.Value]:
    """Return the slot of the first new token of each row [B], and the number of valid slots of the longest row [1], int64."""
    attention_mask, first = by_columns(rewriter), append.inputs[2]
    if attention_mask is None:
        first = rewriter.emit("Gather", [_cache_position(rewriter), rewriter.constant(0)], attributes={"axis": 1})
    assert first is not None
    total = lengths(rewriter)[1] if attention_mask is None else lengths_of_mask(rewriter, attention_mask)[1]
    return first, rewriter.emit("Unsqueeze", [rewriter.emit("Cast", [total], attributes={"to": int(INT64)}), rewriter.constant([0])])


def rows_at_counts(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Count only the last keys of a cache if that is enough; the whole cache is then read by GroupQueryAttention alone. Without a cache, count all keys."""
    append = producer(node.inputs[1], "Append")
    if append is None or rewriter.dtype != "float32":
        return counts.rows_at_counts(rewriter, node)
    node.replace_input_with(1, None)  # no longer a reader of the cache
    return counts.rows_at_last_counts(rewriter, node, append, *_slots(rewriter, append))


def _rotation(q: Optional[ir.Value], k: Optional[ir.Value]) -> Optional[ir.Node]:
    """Return the Rotate node of q if GroupQueryAttention can rotate instead, otherwise None. Its kernel needs D to be a multiple of 16 and r/2 of 8."""
    of_q, of_k = producer(q, "Rotate"), producer(k, "Rotate")
    if of_q is None or of_k is None or of_q.inputs[1:] != of_k.inputs[1:]:
        return None
    if not number(of_q, "linear"):  # GroupQueryAttention rotates by slot, which differs from the position by a constant
        return None
    taken = size(of_q.inputs[0], 3) % 16 == 0 and size(of_q.inputs[2], 1) % 8 == 0
    return of_q if taken else None


def _rotated(rewriter: Rewriter, value: Optional[ir.Value]) -> Optional[ir.Value]:
    node = producer(value, "Rotate")
    if node is None:
        return value
    turned = standard.rotate(rewriter, node)
    turned.shape = node.outputs[0].shape
    return turned


def _projections(rewriter: Rewriter, sources: List[Optional[ir.Value]]) -> List[Optional[ir.Value]]:
    """Return q, k and v as [B,S,N*D], or a single packed input if they are the three parts of one projection."""
    parts = [rewriter.packed(value) for value in sources if value is not None]
    split = parts[0].producer()
    if split is not None and split.op_type == "Split" and list(split.outputs) == parts:
        return [split.inputs[0], None, None]
    return list(parts)


LOWERING = (
    {
        **{name: lowering for name, lowering in standard.LOWERING.items() if name != "Rotate"},
        "AppendPositions": append_positions,
        "FitPositions": standard.as_is,
        "Distances": distances,
        "Attend": attend,
        "CollectByDistance": collect_by_distance,
        "RowsAtCounts": rows_at_counts,
        "AttendTurned": turned.attend,
        "WaveProducts": wave_products,
    },
    {"Append": append, "Mask": standard.mask, "Rotate": standard.rotate},  # nodes that were not merged into GroupQueryAttention
)
