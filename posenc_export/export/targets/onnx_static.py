"""Target `onnx-static`: ai.onnx, opset 24; TensorScatter writes caches of fixed capacity."""

import onnx_ir as ir

from posenc_export.export.targets import cached_attention, onnx_growing, ort_slots, standard
from posenc_export.export.targets.builder import Builder, Table
from posenc_export.ops import graph
from posenc_export.runtime.artefact.graph_inputs import W


def slide(op: Builder, node: graph.Attend) -> ir.Value:
    """Let the caches of a layer begin at a later token than the first if queries read the last
    tokens only: the mask then has the positions in the slots of such a cache.
    """
    cached = cached_attention.Cached.of(node)
    if cached is not None and cached.slides(op, cached.with_scores):
        for append in (cached.key, cached.value):
            assert append.past.shape is not None
            append.past.shape = ir.Shape([*append.past.shape[:2], W, *append.past.shape[3:]])
        keys = positions_in_windows(op, cached.mask.key_positions)
        node.node.replace_input_with(3, standard.mask_of_keys(op, cached.mask, keys))
    return node.output


def positions_in_windows(op: Builder, key_positions: ir.Value) -> ir.Value:
    """Return the positions in the slots of caches of windows [B,W] from those in all slots [B,M];
    -1 behind these.
    """
    first_cache = next(value for value in op.graph.inputs if value.name in op.windows)
    capacity = op.Squeeze(op.Shape(first_cache, start=2, end=3))
    slots = op.Add(ort_slots.window_start(op), op.Range(op.constant(0), capacity, 1))
    behind = op.Shape(key_positions, start=1, end=2)
    return op.GatherElements(op.Pad(key_positions, [0, 1], -1, [1]), op.Min(slots, behind), axis=1)


def append(op: Builder, node: graph.Append) -> ir.Value:
    update, first = op.Transpose(node.new, perm=[0, 2, 1, 3]), node.write_index
    if node.past.name in op.windows:
        first = op.Sub(first, op.Squeeze(ort_slots.window_start(op), [1]))
    return op.TensorScatter(node.past, update, first, axis=2)


def fit_positions(op: Builder, node: graph.FitPositions) -> ir.Value:
    """Pad key positions [B,T] with -1 to the capacity M of the cache: [B,M]."""
    capacity = op.Shape(node.past, start=2, end=3)
    missing = op.Sub(capacity, op.Shape(node.key_positions, start=1, end=2))
    return op.Pad(node.key_positions, op.Concat(op.constant([0]), missing, axis=0), -1, [1])


CACHES: Table = {
    graph.Append: append,
    graph.AppendPositions: lambda op, of: op.TensorScatter(of.past, of.new, of.write_index, axis=1),
    graph.FitPositions: fit_positions,
    graph.Attend: standard.attend,
}
# Masks of layers whose caches slide are chosen before masks are lowered.
LOWERING: tuple[Table, ...] = ({graph.Attend: slide}, {**onnx_growing.LOWERING[0], **CACHES})
