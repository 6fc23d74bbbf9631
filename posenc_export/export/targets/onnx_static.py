"""Target `onnx-static`: ai.onnx, opset 24; TensorScatter writes caches of fixed capacity."""

import onnx_ir as ir

from posenc_export.export.targets import onnx_growing, standard
from posenc_export.export.targets.builder import Builder
from posenc_export.export.targets.rewriter import Table
from posenc_export.ops import graph


def append(op: Builder, node: graph.Append) -> ir.Value:
    update = op.Transpose(node.new, perm=[0, 2, 1, 3])
    return op.TensorScatter(node.past, update, node.write_index, axis=2)


def append_positions(op: Builder, node: graph.AppendPositions) -> ir.Value:
    return op.TensorScatter(node.past, node.new, node.write_index, axis=1)


def fit_positions(op: Builder, node: graph.FitPositions) -> ir.Value:
    """Pad key positions [B,T] with -1 to the capacity M of the cache: [B,M]."""
    capacity = op.Shape(node.past, start=2, end=3)
    missing = op.Sub(capacity, op.Shape(node.key_positions, start=1, end=2))
    return op.Pad(node.key_positions, op.Concat(op.constant([0]), missing, axis=0), -1, [1])


CACHES: Table = {
    graph.Append: append,
    graph.AppendPositions: append_positions,
    graph.FitPositions: fit_positions,
    graph.Attend: standard.attend,
}
LOWERING = ({**onnx_growing.LOWERING[0], **CACHES},)
