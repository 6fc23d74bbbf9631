"""Target `onnx`: ai.onnx operators, opset 23, past in and present out."""

import onnx_ir as ir

from posenc_export.export.rewriter import Rewriter, number, producer
from posenc_export.export.targets import standard

OPSET = 23


def append_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    return rewriter.emit("Concat", node.inputs[:2], attributes={"axis": 1})


def attend(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Attention-23 with past and present: it appends and attends in one node."""
    q, keys, values, mask = node.inputs
    append_key, append_value = producer(keys, "Append"), producer(values, "Append")
    if append_key is None or append_value is None:
        raise ValueError("export: target onnx attends to what it appends, got other keys; choose target torchscript")
    past_key, new_key, past_value, new_value = *append_key.inputs[:2], *append_value.inputs[:2]
    assert q is not None and new_key is not None and new_value is not None
    y, present_key, present_value = rewriter.emit_all(
        "Attention",
        [rewriter.packed(q), rewriter.packed(new_key), rewriter.packed(new_value), mask, past_key, past_value],
        3,
        attributes={"q_num_heads": number(node, "heads"), "kv_num_heads": number(node, "kv_heads"), "scale": float(node.attributes["scale"].value)},
    )
    append_key.outputs[0].replace_all_uses_with(present_key, replace_graph_outputs=True)
    append_value.outputs[0].replace_all_uses_with(present_value, replace_graph_outputs=True)
    return y


LOWERING = {
    "Rotate": standard.rotate,
    "AppendPositions": append_positions,
    "FitPositions": standard.as_is,
    "Distances": standard.distances,
    "Mask": standard.mask,
    "Attend": attend,
}
