"""Target `ort-cuda`: as `ort`, for kernels of the CUDA provider. The slots of the cache are counted by the caller: Range and Slice read their sizes on the host, and a
size that is computed on the device would be copied there in every step."""

from pathlib import Path
from typing import Tuple

import onnx_ir as ir

from posenc_export.export.targets import ort, ort_attention, ort_layers, ort_slots, standard
from posenc_export.export.targets.onnx_file import FILE_NAME, write_onnx
from posenc_export.export.targets.quantized_weights import Fused
from posenc_export.export.targets.rewriter import FLOAT, Builder, Table
from posenc_export.export.trace import Source
from posenc_export.ops import graph
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import cuda_placement


def slots(op: Builder) -> ir.Value:
    """Return the input with the numbers of the slots that a call may read, [T] int64: 0, 1, ... T-1, at least to the last valid slot of the longest row."""
    return op.input("slots", ir.DataType.INT64, ["total_sequence_length"])


def append_positions(op: Builder, node: graph.AppendPositions) -> ir.Value:
    """Key positions of compact rows: the position in slot 0 of each row, plus the slot."""
    return op.Add(ort_slots.first_position(op), slots(op))


def distances(op: Builder, node: graph.Distances) -> ir.Value:
    """Subtract slots of queries from slots of keys, as `ort.distances`."""
    if ort_slots.of_call(op, node.k_positions):
        return standard.distances(op, node)
    return op.Sub(op.Cast(slots(op), to=FLOAT), op.Unsqueeze(op.Cast(ort_slots.cache_position(op), to=FLOAT), [1, 3]))


def append(op: Builder, node: graph.Append) -> ir.Value:
    """Write new keys or values into the buffer in place. Nodes that read all slots get a slice of those that are counted, whose number is known on the host."""
    return ort.append_at(op, node, op.Gather(ort_slots.cache_position(op), 0, axis=1), op.Shape(slots(op)))


def attend(op: Builder, node: graph.Attend) -> ir.Value:
    """As `ort_attention.attend`; sinks beside a bias, which GroupQueryAttention refuses on CUDA, take standard operators."""
    mask = graph.Mask.of(node.mask)
    has_bias = mask is None or mask.bias is not None or mask.chunk > 0
    return standard.attend(op, node) if has_bias and node.sinks is not None else ort_attention.attend(op, node)


LOWERING: Tuple[Table, ...] = (
    {**ort.LOWERING[0], graph.AppendPositions: append_positions, graph.Distances: distances, graph.Attend: attend},
    {**ort.LOWERING[1], graph.Append: append},
)


def write(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write the graph (onnx_file.write_onnx).

    Raises:
        ValueError: as for write_onnx; the CUDA provider has no kernel for a node, or one that refuses it.
    """
    manifest = write_onnx(source, manifest, LOWERING, folder, Fused, ort_layers.FUSIONS)
    found = cuda_placement.placed(folder / FILE_NAME)
    if not found.runs and manifest.dtype != "float32":  # in which a graph of half precision is verified on the CPU
        rule, remedy = "a graph that ONNX Runtime's CUDA provider runs", "change the model, or choose target onnx-static or ort"
        raise ValueError(f"export: expected {rule} for target {manifest.target}, got one that {found.said()}; {remedy}")
    return manifest
