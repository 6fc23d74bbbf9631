"""Target `onnx-static`: ai.onnx operators, opset 24, caches of a fixed capacity written in place by TensorScatter."""

import onnx_ir as ir

from posenc_export.export.targets import collected, counts, standard, turned_keys, waves
from posenc_export.export.targets.rewriter import Rewriter


def append(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    past, new, write_index = node.inputs
    update = rewriter.emit("Transpose", [new], attributes={"perm": [0, 2, 1, 3]})
    return rewriter.emit("TensorScatter", [past, update, write_index], attributes={"axis": 2})


def append_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    return rewriter.emit("TensorScatter", node.inputs, attributes={"axis": 1})


def fit_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Pad key positions [B,T] with -1 to the capacity M of the cache: [B,M]."""
    key_positions, past = node.inputs
    capacity = rewriter.emit("Shape", [past], attributes={"start": 2, "end": 3})
    missing = rewriter.emit("Sub", [capacity, rewriter.emit("Shape", [key_positions], attributes={"start": 1, "end": 2})])
    pads = rewriter.emit("Concat", [rewriter.constant([0]), missing], attributes={"axis": 0})
    return rewriter.emit("Pad", [key_positions, pads, rewriter.constant(-1), rewriter.constant([1])])


LOWERING = (
    {
        **standard.LOWERING,
        "CollectByDistance": collected.collect_by_distance,
        "RowsAtCounts": counts.rows_at_counts,
        "AttendTurnedKeys": turned_keys.attend,
        "WaveProducts": waves.wave_products,
        "Append": append,
        "AppendPositions": append_positions,
        "FitPositions": fit_positions,
        "Distances": standard.distances,
        "Mask": standard.mask,
    },
)
