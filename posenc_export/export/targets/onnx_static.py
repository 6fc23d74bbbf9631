"""Target `onnx-static`: ai.onnx operators, opset 24, caches of a fixed capacity written in place by TensorScatter."""

import onnx_ir as ir

from posenc_export.export.targets import collected, counts, standard, turned_keys, waves
from posenc_export.export.targets.rewriter import Builder
from posenc_export.ops import graph


def append(op: Builder, node: graph.Append) -> ir.Value:
    return op.TensorScatter(node.past, op.Transpose(node.new, perm=[0, 2, 1, 3]), node.write_index, axis=2)


def append_positions(op: Builder, node: graph.AppendPositions) -> ir.Value:
    return op.TensorScatter(node.past, node.new, node.write_index, axis=1)


def fit_positions(op: Builder, node: graph.FitPositions) -> ir.Value:
    """Pad key positions [B,T] with -1 to the capacity M of the cache: [B,M]."""
    capacity = op.Shape(node.past, start=2, end=3)
    missing = op.Sub(capacity, op.Shape(node.key_positions, start=1, end=2))
    return op.Pad(node.key_positions, op.Concat(op.constant([0]), missing, axis=0), -1, [1])


LOWERING = (
    {
        **standard.LOWERING,
        graph.CollectByDistance: collected.collect_by_distance,
        graph.RowsAtCounts: counts.rows_at_counts,
        graph.AttendTurnedKeys: turned_keys.attend,
        graph.WaveProducts: waves.wave_products,
        graph.Append: append,
        graph.AppendPositions: append_positions,
        graph.FitPositions: fit_positions,
        graph.Distances: standard.distances,
        graph.Mask: standard.mask,
    },
)
