"""What the ai.onnx targets share: rotation and the mask, as standard operators."""

import numpy as np
import onnx_ir as ir

from posenc_export.export.rewriter import Rewriter, number, size

NEVER = -np.inf


def rotate(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """RotaryEmbedding-23 on packed heads; -1 reads row 0, whose result nobody sees."""
    x, positions, cos, sin = node.inputs
    assert x is not None and cos is not None and sin is not None
    heads, rotary = size(x, 2), 2 * size(cos, 1)
    rows = rewriter.emit("Max", [positions, rewriter.constant(0)])
    attributes = {"interleaved": number(node, "interleaved"), "num_heads": heads}
    if rotary < size(x, 3):
        attributes["rotary_embedding_dim"] = rotary
    turned = rewriter.emit("RotaryEmbedding", [rewriter.packed(x), rewriter.table(cos), rewriter.table(sin), rows], attributes=attributes)
    return rewriter.unpacked(turned, heads)


def distances(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Key minus query position, subtracted as int64: exact at any offset."""
    queries = rewriter.emit("Unsqueeze", [node.inputs[0], rewriter.constant([1, 3])])
    keys = rewriter.emit("Unsqueeze", [node.inputs[1], rewriter.constant([1, 2])])
    return rewriter.emit("Cast", [rewriter.emit("Sub", [keys, queries])], attributes={"to": int(ir.DataType.FLOAT)})


def mask(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Additive [B,1 or H,S,T] in the dtype of activations: bias or 0 where visible, -inf elsewhere."""
    positions, key_positions, bias, _ = node.inputs
    keys = rewriter.emit("Unsqueeze", [key_positions, rewriter.constant([1])])
    visible = rewriter.emit("GreaterOrEqual", [keys, rewriter.constant(0)])
    if number(node, "causal"):
        queries = rewriter.emit("Unsqueeze", [positions, rewriter.constant([2])])
        visible = rewriter.emit("And", [visible, rewriter.emit("LessOrEqual", [keys, queries])])
    visible = rewriter.emit("Unsqueeze", [visible, rewriter.constant([1])])
    scores = rewriter.constant(0, rewriter.dtype) if bias is None else in_dtype(rewriter, bias)
    return rewriter.emit("Where", [visible, scores, rewriter.constant(NEVER, rewriter.dtype)])


def in_dtype(rewriter: Rewriter, value: ir.Value) -> ir.Value:
    """A float32 value in the dtype of activations."""
    if rewriter.dtype == "float32":
        return value
    return rewriter.emit("Cast", [value], attributes={"to": int(rewriter.onnx_dtype)})


def as_is(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """The first input, unchanged."""
    value = node.inputs[0]
    assert value is not None
    return value
