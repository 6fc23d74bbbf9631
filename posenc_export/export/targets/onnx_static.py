"""Target `onnx-static`: ai.onnx operators, opset 24, caches of a fixed capacity written in place by TensorScatter."""

import onnx_ir as ir

from posenc_export.export.rewriter import Rewriter
from posenc_export.export.targets import standard

OPSET = 24


def append(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    past, new, write_index = node.inputs
    update = rewriter.emit("Transpose", [new], perm=[0, 2, 1, 3])
    return rewriter.emit("TensorScatter", [past, update, write_index], axis=2)  # type: ignore[no-any-return]


def append_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    return rewriter.emit("TensorScatter", node.inputs, axis=1)  # type: ignore[no-any-return]


def fit_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Pad [B,T] with -1 to the M slots of the cache."""
    key_positions, past = node.inputs
    capacity = rewriter.emit("Shape", [past], start=2, end=3)
    missing = rewriter.emit("Sub", [capacity, rewriter.emit("Shape", [key_positions], start=1, end=2)])
    pads = rewriter.emit("Concat", [rewriter.constant([0]), missing], axis=0)
    return rewriter.emit("Pad", [key_positions, pads, rewriter.constant(-1), rewriter.constant([1])])  # type: ignore[no-any-return]


def attend(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    q, keys, values, mask = node.inputs
    by_head = rewriter.emit("Transpose", [q], perm=[0, 2, 1, 3])
    y = rewriter.emit("Attention", [by_head, keys, values, mask], scale=float(node.attributes["scale"].value))
    return rewriter.packed(rewriter.emit("Transpose", [y], perm=[0, 2, 1, 3]))


LOWERING = {
    "Rotate": standard.rotate,
    "Append": append,
    "AppendPositions": append_positions,
    "FitPositions": fit_positions,
    "Distances": standard.distances,
    "Mask": standard.mask,
    "Attend": attend,
}

