"""Target `ort`: com.microsoft GroupQueryAttention with shared buffers and cost O(valid length); standard operators elsewhere.

With position_ids, rows are compact: the tokens of a row fill its first slots. Differences of slots are then differences of positions, and GroupQueryAttention can
rotate by slot, which is exact for any offset. With attention_mask, a slot is a column of the mask: keys are rotated before the node, and the mask is added as a bias.
"""

import onnx_ir as ir

from posenc_export.export.targets import collected, counts, experts, ort_attention, ort_slots, standard, waves
from posenc_export.export.targets.rewriter import Rewriter, number, producer


def append_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Key positions of compact rows: the input first_position [B,1], which is the position in slot 0, plus the slot."""
    slots = rewriter.emit("Range", [rewriter.constant(0), ort_slots.total(rewriter), rewriter.constant(1)])
    return rewriter.emit("Add", [ort_slots.first_position(rewriter), slots])


def wave_products(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Use that slots of compact rows have consecutive positions."""
    if not ort_slots.in_slots(rewriter, node.inputs[1]):
        return waves.wave_products(rewriter, node)
    return waves.consecutive_wave_products(rewriter, node, ort_slots.first_position(rewriter), ort_slots.total(rewriter))


def distances(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Subtract slots of queries from slots of keys, for compact rows. It is exact in float32 below 2^24 slots and takes fewer nodes than positions in int64."""
    if ort_slots.of_call(rewriter, node.inputs[1]):
        return standard.distances(rewriter, node)
    _, total = ort_slots.lengths(rewriter)
    count = rewriter.emit("Cast", [total], attributes={"to": int(ir.DataType.FLOAT)})
    slots = rewriter.emit("Range", [rewriter.constant(0, "float32"), count, rewriter.constant(1, "float32")])
    queries = rewriter.emit("Cast", [ort_slots.cache_position(rewriter)], attributes={"to": int(ir.DataType.FLOAT)})
    return rewriter.emit("Sub", [slots, rewriter.emit("Unsqueeze", [queries, rewriter.constant([1, 3])])])


def collect_by_distance(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Use that differences of slots of compact rows are distances."""
    if ort_slots.in_slots(rewriter, node.inputs[2]) and number(node, "left"):
        return collected.collect_from_slots(rewriter, node, ort_slots.cache_position(rewriter))
    return collected.collect_by_distance(rewriter, node)


def append(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Write new keys or values into the buffer in place, and return the whole buffer. Nodes that read all slots get a slice of the valid ones."""
    return append_at(rewriter, node, *ort_slots.written(rewriter, node))


def append_at(rewriter: Rewriter, node: ir.Node, first: ir.Value, total: ir.Value) -> ir.Value:
    """`append` from slots first [B] on; other nodes read slots 0 .. total - 1, [1]."""
    past, new, _ = node.inputs
    update = rewriter.emit("Transpose", [new], attributes={"perm": [0, 2, 1, 3]})
    buffer = rewriter.emit("TensorScatter", [past, update, first], attributes={"axis": 2})
    valid = rewriter.emit("Slice", [buffer, rewriter.constant([0]), total, rewriter.constant([2])])
    for reader, index in list(node.outputs[0].uses()):
        if reader.op_type != "GatherElements":  # which reads only the slots it is given
            reader.replace_input_with(index, valid)
    return buffer


def rows_at_counts(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Count only the last keys of a cache if that is enough; the whole cache is then read by GroupQueryAttention alone. Without a cache, count all keys."""
    append = producer(node.inputs[1], "Append")
    if append is None or rewriter.dtype != "float32":
        return counts.rows_at_counts(rewriter, node)
    node.replace_input_with(1, None)  # no longer a reader of the cache
    return counts.rows_at_last_counts(rewriter, node, append, *ort_slots.written(rewriter, append))


LEFT = ("ChooseRotation", "JoinRotations", "Rotate")  # nodes of standard.LOWERING that Attend may merge
LOWERING = (
    {
        **{name: lowering for name, lowering in standard.LOWERING.items() if name not in LEFT},
        "AppendPositions": append_positions,
        "FitPositions": standard.as_is,
        "Distances": distances,
        "Attend": ort_attention.attend,
        "CollectByDistance": collect_by_distance,
        "RowsAtCounts": rows_at_counts,
        "AttendTurnedKeys": ort_attention.attend_turned,
        "WaveProducts": wave_products,
        "Experts": experts.sparse,
    },
    {"Append": append, "Mask": standard.mask, **{name: standard.LOWERING[name] for name in LEFT}},  # nodes that were not merged into GroupQueryAttention
)
