"""Target `ort`: com.microsoft GroupQueryAttention with shared buffers, cost O(valid length); standard operators elsewhere.

With position_ids, rows are compact: row b's tokens fill its own first slots, so slot differences are position differences and the node
may rotate by slot, exactly, for any offset. With attention_mask, slots are columns: rotation stands outside and the mask is a bias.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import onnx_ir as ir

from posenc_export.export.rewriter import Rewriter, number, producer, size
from posenc_export.export.targets import collected, counts, standard, waves

DOMAIN = "com.microsoft"
AFTER_SOFTMAX = 2  # of qk_output
INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def by_columns(rewriter: Rewriter) -> Optional[ir.Value]:
    """attention_mask, where slots are columns; None where rows are compact."""
    return next((value for value in rewriter.graph.inputs if value.name == "attention_mask"), None)


def lengths(rewriter: Rewriter) -> Tuple[ir.Value, ir.Value]:
    """seqlens_k [B] int32, valid tokens per row minus 1, and total_sequence_length [] int32, the most of any row: from the session."""
    return rewriter.input("seqlens_k", INT32, ["batch_size"]), rewriter.input("total_sequence_length", INT32, [])


def lengths_of_mask(rewriter: Rewriter, attention_mask: ir.Value) -> Tuple[ir.Value, ir.Value]:
    """The same two where every column is a slot."""
    total = rewriter.emit("Cast", [rewriter.emit("Shape", [attention_mask], attributes={"start": 1, "end": 2})], attributes={"to": int(INT32)})
    last = rewriter.emit("Sub", [total, rewriter.constant([1], "int32")])
    rows = rewriter.emit("Expand", [last, rewriter.emit("Shape", [attention_mask], attributes={"start": 0, "end": 1})])
    return rows, rewriter.emit("Squeeze", [total])


def _cache_position(rewriter: Rewriter) -> ir.Value:
    """The slot of each new token of compact rows [B,S]."""
    return rewriter.input("cache_position", INT64, ["batch_size", "sequence_length"])


def append_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Key positions of compact rows: first_position [B,1], that of slot 0, counted up to the longest row."""
    slots = rewriter.emit("Range", [rewriter.constant(0), _total(rewriter), rewriter.constant(1)])
    return rewriter.emit("Add", [_first_position(rewriter), slots])


def _total(rewriter: Rewriter) -> ir.Value:
    """The number of valid slots of the longest of compact rows [], int64."""
    return rewriter.emit("Cast", [lengths(rewriter)[1]], attributes={"to": int(INT64)})


def _first_position(rewriter: Rewriter) -> ir.Value:
    """The position of slot 0 of compact rows [B,1]."""
    return rewriter.input("first_position", INT64, ["batch_size", 1])


def _of_call(rewriter: Rewriter, key_positions: Optional[ir.Value]) -> bool:
    """Whether keys are not in slots of compact rows: with attention_mask, and without a cache."""
    return by_columns(rewriter) is not None or (key_positions is not None and key_positions.is_graph_input())


def _in_slots(rewriter: Rewriter, key_positions: Optional[ir.Value]) -> bool:
    """Whether the keys of a node can be read by slot instead of by position. Only measured in float32."""
    return rewriter.dtype == "float32" and not _of_call(rewriter, key_positions)


def wave_products(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Slots of compact rows have consecutive positions."""
    if not _in_slots(rewriter, node.inputs[1]):
        return waves.wave_products(rewriter, node)
    return waves.consecutive_wave_products(rewriter, node, _first_position(rewriter), _total(rewriter))


def distances(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Of compact rows slot minus cache_position [B,S], the slot of each new token: exact in float32 below 2^24 slots, and no node too many at decode."""
    if _of_call(rewriter, node.inputs[1]):
        return standard.distances(rewriter, node)
    _, total = lengths(rewriter)
    count = rewriter.emit("Cast", [total], attributes={"to": int(ir.DataType.FLOAT)})
    slots = rewriter.emit("Range", [rewriter.constant(0, "float32"), count, rewriter.constant(1, "float32")])
    queries = rewriter.emit("Cast", [_cache_position(rewriter)], attributes={"to": int(ir.DataType.FLOAT)})
    return rewriter.emit("Sub", [slots, rewriter.emit("Unsqueeze", [queries, rewriter.constant([1, 3])])])


def attend(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """GroupQueryAttention, where it alone reads the keys and values it appends; else attention over the valid slots."""
    appended = standard.appended_here(node)
    if appended is None or not _fits(rewriter, node):
        return standard.attend(rewriter, node)
    append_key, append_value = appended
    q, attention_mask = node.inputs[0], by_columns(rewriter)
    semantic_mask = producer(node.inputs[3], "Mask")
    assert semantic_mask is not None and not number(semantic_mask, "after")  # a cache looks back
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
    """Slot differences of compact rows are distances."""
    if _in_slots(rewriter, node.inputs[2]) and number(node, "left"):
        return collected.collect_from_slots(rewriter, node, _cache_position(rewriter))
    return collected.collect_by_distance(rewriter, node)


def _fits(rewriter: Rewriter, node: ir.Node) -> bool:
    """Whether the node takes it: in float16 no scores from content, which may leave the range of its bias."""
    return standard.content_of(node) is None or rewriter.dtype == "float32"


def _turned(
    rewriter: Rewriter, sources: List[Optional[ir.Value]], rotation: Optional[ir.Node]
) -> Tuple[List[Optional[ir.Value]], List[Optional[ir.Value]], Dict[str, Any]]:
    """Queries, keys and values as the node reads them, its tables of cos and sin, and its attributes of rotation: it turns them itself, or reads turned ones."""
    if rotation is None:
        return [_rotated(rewriter, value) for value in sources], [None, None], {}
    tables = [rewriter.table(rotation.inputs[2]), rewriter.table(rotation.inputs[3])]  # type: ignore[arg-type]
    unturned = [rotated.inputs[0] if (rotated := producer(value, "Rotate")) else value for value in sources]
    return unturned, list(tables), {"do_rotary": 1, "rotary_interleaved": number(rotation, "interleaved")}


def _widened(append_key: ir.Node, append_value: ir.Node) -> int:
    """The head size of the node, which has one for keys and values, a multiple of 8. Both caches get it; what is narrower has zeros behind it."""
    caches = [append_key.inputs[0], append_value.inputs[0]]
    wide = -(-max(size(past, 3) for past in caches) // 8) * 8
    for past in caches:
        assert past is not None and past.shape is not None
        past.shape = ir.Shape([*past.shape[:3], wide])
    return wide


def _padded(rewriter: Rewriter, value: Optional[ir.Value], wide: int) -> Optional[ir.Value]:
    """Heads [B,S,N,D] with zeros behind them, [B,S,N,wide]."""
    missing = wide - size(value, 3)
    if not missing:
        return value
    return rewriter.emit("Pad", [value, rewriter.constant([0, missing]), rewriter.constant(0, rewriter.dtype), rewriter.constant([3])])


def _reads_slots(rewriter: Rewriter, shares: ir.Node) -> bool:
    """Whether all readers of shares read only those of keys up to the query, which the node writes."""
    users = [user for user, _ in shares.outputs[0].uses()]
    return all(user.op_type == "CollectByDistance" and number(user, "left") and _in_slots(rewriter, user.inputs[2]) for user in users)


def _where_seen(rewriter: Rewriter, shares: ir.Value, mask: Optional[ir.Value]) -> ir.Value:
    """shares [B,H,S,T] of keys that a query sees, 0 for others: the node does not write the entries behind a shorter row."""
    seen = rewriter.emit("Greater", [mask, rewriter.constant(standard.LEAST, "float32")])
    return rewriter.emit("Where", [seen, shares, rewriter.constant(0, "float32")])


def _first_of_heads(rewriter: Rewriter, y: ir.Value, heads: int, count: int) -> ir.Value:
    """y [B,S,H*D] with the first `count` entries of each head."""
    by_head = rewriter.emit("Reshape", [y, rewriter.constant([0, 0, heads, -1])])
    first = rewriter.emit("Slice", [by_head, rewriter.constant([0]), rewriter.constant([count]), rewriter.constant([3])])
    return rewriter.packed(first)


def _seen(mask: ir.Node) -> Optional[Dict[str, int]]:
    """Attributes of the node by which compact rows see what the mask says, a window being a query and the keys before it; None where only the mask can say it."""
    before = number(mask, "before")
    if number(mask, "chunk"):
        return None
    return {} if before < 0 else {"local_window_size": before + 1}


def _at_tokens(rewriter: Rewriter, y: ir.Value, positions: Optional[ir.Value]) -> ir.Value:
    """y [B,S,H*D] at tokens, 0 at padding: that sees no key, and the node's softmax of nothing but -inf is not a number."""
    token = rewriter.emit("GreaterOrEqual", [rewriter.emit("Unsqueeze", [positions, rewriter.constant([2])]), rewriter.constant(0)])
    return rewriter.emit("Where", [token, y, rewriter.constant(0, rewriter.dtype)])


def _sum(rewriter: Rewriter, scores: Sequence[Optional[ir.Value]]) -> Optional[ir.Value]:
    """Of scores in one dtype, those that are there."""
    there = [value for value in scores if value is not None]
    if not there:
        return None
    return there[0] if len(there) == 1 else rewriter.emit("Add", there)


def _in_dtype(rewriter: Rewriter, scores: Optional[ir.Value]) -> Optional[ir.Value]:
    return None if scores is None else standard.in_dtype(rewriter, scores)


def append(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Written in place into the whole buffer, which is the output; readers of all slots get the valid ones."""
    past, new, _ = node.inputs
    first, total = _slots(rewriter, node)
    update = rewriter.emit("Transpose", [new], attributes={"perm": [0, 2, 1, 3]})
    buffer = rewriter.emit("TensorScatter", [past, update, first], attributes={"axis": 2})
    valid = rewriter.emit("Slice", [buffer, rewriter.constant([0]), total, rewriter.constant([2])])
    for reader, index in list(node.outputs[0].uses()):
        if reader.op_type != "GatherElements":  # which reads what it names alone
            reader.replace_input_with(index, valid)
    return buffer


def _slots(rewriter: Rewriter, append: ir.Node) -> Tuple[ir.Value, ir.Value]:
    """The slot of the first new token of each row [B], and the number of valid slots of the longest row [1], int64."""
    attention_mask, first = by_columns(rewriter), append.inputs[2]
    if attention_mask is None:
        first = rewriter.emit("Gather", [_cache_position(rewriter), rewriter.constant(0)], attributes={"axis": 1})
    assert first is not None
    total = lengths(rewriter)[1] if attention_mask is None else lengths_of_mask(rewriter, attention_mask)[1]
    return first, rewriter.emit("Unsqueeze", [rewriter.emit("Cast", [total], attributes={"to": int(INT64)}), rewriter.constant([0])])


def rows_at_counts(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Counts of the last keys, beside a GroupQueryAttention, which then alone reads the whole cache; counts of all keys where there is none."""
    append = producer(node.inputs[1], "Append")
    if append is None or rewriter.dtype != "float32":
        return counts.rows_at_counts(rewriter, node)
    node.replace_input_with(1, None)  # no longer a reader of the cache
    return counts.rows_at_last_counts(rewriter, node, append, *_slots(rewriter, append))


def _rotation(q: Optional[ir.Value], k: Optional[ir.Value]) -> Optional[ir.Node]:
    """The rotation of q, where q and k turn by the same tables and the kernel takes their sizes (D a multiple of 16, r/2 of 8)."""
    of_q, of_k = producer(q, "Rotate"), producer(k, "Rotate")
    if of_q is None or of_k is None or of_q.inputs[1:] != of_k.inputs[1:]:
        return None
    if not number(of_q, "linear"):  # the node rotates by slot, which is the position but for a constant
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
    """q, k, v as [B,S,N*D]; one packed input where they are the three parts of one projection."""
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
        "WaveProducts": wave_products,
    },
    {"Append": append, "Mask": standard.mask, "Rotate": standard.rotate},  # what no GroupQueryAttention took over
)
