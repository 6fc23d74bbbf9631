"""Target `onnx`: ai.onnx operators, opset 23; caches are past inputs and present outputs."""

from typing import Any

import onnx_ir as ir

from posenc_export.export.targets import content, experts, standard
from posenc_export.export.targets.builder import Builder, Table
from posenc_export.ops import graph


def append(op: Builder, node: graph.Append) -> ir.Value:
    return op.Concat(node.past, op.Transpose(node.new, perm=[0, 2, 1, 3]), axis=2)


def attend(op: Builder, node: graph.Attend) -> ir.Value:
    """Emit one Attention-23 that appends and attends, in float32 if only it reads the caches."""
    appended = standard.appended_here(node)
    if (
        appended is None
        or op.dtype != "float32"
        or node.sinks is not None
        or node.readers(graph.AttentionWeights)
    ):
        return standard.attend(op, node)
    key, value = appended
    heads = [op.merge_heads(part) for part in (node.q, key.new, value.new)]
    attributes: dict[str, Any] = {"q_num_heads": node.heads, "kv_num_heads": node.kv_heads}
    attributes |= standard.scores_of(node)
    y, present_key, present_value = op.several(
        3, "Attention", *heads, standard.whole_mask(op, node), key.past, value.past, **attributes
    )
    key.output.replace_all_uses_with(present_key, replace_graph_outputs=True)
    value.output.replace_all_uses_with(present_value, replace_graph_outputs=True)
    return y


# Of operations that take one expression.
SHORT: Table = {
    graph.AppendPositions: lambda op, of: op.Concat(of.past, of.new, axis=1),
    graph.FitPositions: lambda op, of: of.key_positions,
    graph.Products: lambda op, of: standard.products_of(op, of, of.q, of.keys),
    graph.WeightedValues: lambda op, of: standard.weighted_sum(op, of, of.weights, of.values),
    graph.SuffixSum: lambda op, of: op.CumSum(of.x, -1, reverse=1, exclusive=int(not of.own)),
    graph.Scale: lambda op, of: op.Mul(of.x, op.table(op.constant(of.factor, "float32"))),
    graph.SelectTokens: lambda op, of: op.GatherND(of.x, op.Unsqueeze(of.index, [2]), batch_dims=1),
}
LOWERING: tuple[Table, ...] = (
    {
        **SHORT,
        graph.Rotate: standard.rotate,
        graph.RefuseGaps: standard.refuse_gaps,
        graph.Distances: standard.distances,
        graph.Mask: standard.mask,
        graph.Attend: attend,
        graph.AttendTurnedKeys: content.attend_turned_keys,
        graph.WaveProducts: content.wave_products,
        graph.LayersOfRatio: content.layers_of_ratio,
        graph.Pick: content.pick,
        graph.SumsBetween: content.sums_between,
        graph.RowsAtCounts: content.rows_at_counts,
        graph.CollectByDistance: content.collect_by_distance,
        graph.Recur: standard.recur,
        graph.GatedDelta: content.scanned,
        graph.Experts: experts.dense,
    },
    {graph.Append: append},  # those that were not merged into an Attention node
)
