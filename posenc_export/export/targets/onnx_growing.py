"""Target `onnx`: ai.onnx operators, opset 23; caches are past inputs and present outputs."""

import onnx_ir as ir

from posenc_export.export.targets import collected, counts, standard, turned_keys, waves
from posenc_export.export.targets.rewriter import Rewriter, number


def append_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    return rewriter.emit("Concat", node.inputs[:2], attributes={"axis": 1})


def append(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    new = rewriter.emit("Transpose", [node.inputs[1]], attributes={"perm": [0, 2, 1, 3]})
    return rewriter.emit("Concat", [node.inputs[0], new], attributes={"axis": 2})


def attend(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Use one Attention-23 node with past and present, which appends and attends, if the dtype is float32 and no other node reads keys and values."""
    appended = standard.appended_here(node)
    if appended is None or rewriter.dtype != "float32" or standard.sinks_of(node) is not None or standard.shares_of(node) is not None:
        return standard.attend(rewriter, node)
    append_key, append_value = appended
    past_key, new_key, past_value, new_value = *append_key.inputs[:2], *append_value.inputs[:2]
    q = node.inputs[0]
    assert q is not None and new_key is not None and new_value is not None
    y, present_key, present_value = rewriter.emit_all(
        "Attention",
        [rewriter.packed(q), rewriter.packed(new_key), rewriter.packed(new_value), standard.whole_mask(rewriter, node), past_key, past_value],
        3,
        attributes={"q_num_heads": number(node, "heads"), "kv_num_heads": number(node, "kv_heads"), **standard.scores_of(node)},
    )
    append_key.outputs[0].replace_all_uses_with(present_key, replace_graph_outputs=True)
    append_value.outputs[0].replace_all_uses_with(present_value, replace_graph_outputs=True)
    return y


LOWERING = (
    {
        **standard.LOWERING,
        "CollectByDistance": collected.collect_by_distance,
        "RowsAtCounts": counts.rows_at_counts,
        "AttendTurnedKeys": turned_keys.attend,
        "WaveProducts": waves.wave_products,
        "AppendPositions": append_positions,
        "FitPositions": standard.as_is,
        "Distances": standard.distances,
        "Mask": standard.mask,
        "Attend": attend,
    },
    {"Append": append},  # those that were not merged into an Attention node
)
