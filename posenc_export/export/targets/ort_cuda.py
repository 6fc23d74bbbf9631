"""Target `ort-cuda`: as `ort`, for kernels of the CUDA provider. The slots of the cache are counted by the caller: Range and Slice read their sizes on the host, and a
size that is computed on the device would be copied there in every step."""

from pathlib import Path

import onnx_ir as ir

from posenc_export.export.targets import ort, ort_attention, ort_layers, ort_slots, standard
from posenc_export.export.targets.onnx_file import FILE_NAME, write_onnx
from posenc_export.export.targets.quantized_weights import Fused
from posenc_export.export.targets.rewriter import Rewriter, number, producer
from posenc_export.export.trace import Source
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import cuda_placement


def slots(rewriter: Rewriter) -> ir.Value:
    """Return the input with the numbers of the slots that a call may read, [T] int64: 0, 1, ... T-1, at least to the last valid slot of the longest row."""
    return rewriter.input("slots", ort_slots.INT64, ["total_sequence_length"])


def append_positions(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Key positions of compact rows: the position in slot 0 of each row, plus the slot."""
    return rewriter.emit("Add", [ort_slots.first_position(rewriter), slots(rewriter)])


def distances(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Subtract slots of queries from slots of keys, as `ort.distances`."""
    if ort_slots.of_call(rewriter, node.inputs[1]):
        return standard.distances(rewriter, node)
    keys, queries = (rewriter.emit("Cast", [value], attributes={"to": int(ir.DataType.FLOAT)}) for value in (slots(rewriter), ort_slots.cache_position(rewriter)))
    return rewriter.emit("Sub", [keys, rewriter.emit("Unsqueeze", [queries, rewriter.constant([1, 3])])])


def append(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Write new keys or values into the buffer in place. Nodes that read all slots get a slice of those that are counted, whose number is known on the host."""
    first = rewriter.emit("Gather", [ort_slots.cache_position(rewriter), rewriter.constant(0)], attributes={"axis": 1})
    return ort.append_at(rewriter, node, first, rewriter.emit("Shape", [slots(rewriter)]))


def attend(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """As `ort_attention.attend`; sinks beside a bias, which GroupQueryAttention refuses on CUDA, take standard operators."""
    mask = producer(node.inputs[3], "Mask")
    has_bias = mask is None or mask.inputs[2] is not None or number(mask, "chunk") > 0
    if has_bias and standard.sinks_of(node) is not None:
        return standard.attend(rewriter, node)
    return ort_attention.attend(rewriter, node)


LOWERING = (
    {**ort.LOWERING[0], "AppendPositions": append_positions, "Distances": distances, "Attend": attend},
    {**ort.LOWERING[1], "Append": append},
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
