"""Target `ort`: com.microsoft GroupQueryAttention with shared buffers and cost O(valid length);
standard operators elsewhere.

With position_ids, rows are compact: the tokens of a row fill its first slots. Differences of slots
are then differences of positions, and GroupQueryAttention can rotate by slot, which is exact for
any offset. With attention_mask, a slot is a column of the mask: keys are rotated before the node,
and the mask is added as a bias.
"""

from typing import Tuple

import onnx_ir as ir

from posenc_export.export.targets import (
    cached_attention,
    content,
    counts,
    experts,
    gated_delta,
    onnx_growing,
    ort_slots,
    standard,
)
from posenc_export.export.targets.builder import FLOAT, MICROSOFT, Builder, transposed
from posenc_export.export.targets.rewriter import Replaced, Table
from posenc_export.ops import graph
from posenc_export.runtime.graphs.kernel_library import OPERATOR


def append_positions(op: Builder, node: graph.AppendPositions) -> ir.Value:
    return ort_slots.key_positions(op)


def wave_products(op: Builder, node: graph.WaveProducts) -> ir.Value:
    """Use that slots of compact rows have consecutive positions."""
    if not ort_slots.in_slots(op, node.k_positions):
        return content.wave_products(op, node)
    first, total = op.input("first_position"), ort_slots.total(op)
    return content.consecutive_wave_products(op, node, first, total)


def rows_at_counts(op: Builder, node: graph.RowsAtCounts) -> ir.Value:
    """Count only the last keys of a cache if that is enough."""
    append = graph.Append.of(node.keys)
    if append is None or op.dtype != "float32":
        return counts.rows_at_counts(op, node)
    node.node.replace_input_with(1, None)  # no longer a reader of the cache
    return counts.rows_at_last_counts(op, node, append, *ort_slots.written(op, append))


def distances(op: Builder, node: graph.Distances) -> ir.Value:
    """Subtract slots, exact in float32 below 2^24 and with fewer nodes than int64 positions."""
    if ort_slots.of_call(op, node.k_positions):
        return standard.distances(op, node)
    slots, queries = ort_slots.slots(op), ort_slots.cache_position(op)
    keys, queries = (op.Cast(value, to=FLOAT) for value in (slots, queries))
    return op.Sub(keys, op.Unsqueeze(queries, [1, 3]))


def append(op: Builder, node: graph.Append) -> ir.Value:
    """Write into the buffer in place; nodes that read all slots get a slice of the valid ones."""
    first, total = ort_slots.written(op, node)
    buffer = op.TensorScatter(node.past, op.Transpose(node.new, perm=[0, 2, 1, 3]), first, axis=2)
    valid = op.Slice(buffer, [0], total, [2])
    for reader, index in list(node.output.uses()):
        # Others than those which read only the slots that they are given.
        if reader.op_type not in ("GatherElements", OPERATOR):
            reader.replace_input_with(index, valid)
    return buffer


def transposed_product(op: Builder, node: ir.Node) -> Replaced:
    """Fuse the product of x and a transposed constant matrix, such as a tied token table, to
    FusedMatMul, which reads the constant without transposing it.

    Otherwise ONNX Runtime stores a transposed copy of the constant whenever it loads the graph.
    """
    x, turned = node.inputs
    matrix = transposed(turned)
    if turned is None or matrix is None or matrix.const_value is None:
        return []
    order = turned.producer().attributes.get("perm")  # type: ignore[union-attr]
    if len(matrix.const_value.shape) != 2 or (order and tuple(order.as_ints()) != (1, 0)):
        return []
    return [(node.outputs[0], op.FusedMatMul(x, matrix, domain=MICROSOFT, transB=1))]


# Nodes that are not merged into GroupQueryAttention.
LATER = (graph.Mask, graph.Rotate)
LOWERING: Tuple[Table, ...] = (
    {
        **{kind: emit for kind, emit in onnx_growing.LOWERING[0].items() if kind not in LATER},
        graph.AppendPositions: append_positions,
        graph.Distances: distances,
        graph.Attend: cached_attention.attend,
        graph.WaveProducts: wave_products,
        graph.RowsAtCounts: rows_at_counts,
        graph.GatedDelta: gated_delta.fused,
        graph.Experts: experts.sparse,
    },
    {graph.Append: append, **{kind: onnx_growing.LOWERING[0][kind] for kind in LATER}},
)
# A sum and the norm after it stay two nodes: on a CPU, SkipSimplifiedLayerNormalization of ONNX
# Runtime 1.31 takes 1.2 to 2.7 times as long as Add and RMSNormalization at widths of 576 and more,
# SkipLayerNormalization 1.7 to 7 times as long as Add and LayerNormalization. ONNX Runtime itself
# fuses BiasGelu and QuickGelu when it loads the graph.
FUSIONS = {"MatMul": transposed_product}
