"""Targets `ort`, `ort-native` and `ort-cuda`: one lowering with three sets of kernels.

`ort`: com.microsoft GroupQueryAttention with shared buffers and cost O(valid length); standard
operators elsewhere. With position_ids, rows are compact: the tokens of a row fill its first slots.
Differences of slots are then differences of positions, and GroupQueryAttention can rotate by slot,
which is exact for any offset. With attention_mask, a slot is a column of the mask: keys are rotated
before the node, and the mask is added as a bias.

`ort-native`: the operator of packages/kernels in place of GroupQueryAttention and of what stands
before it: rotations by any table, biases by distance, chunks, and several rows of several tokens
over a cache. Nodes that it cannot represent are those of `ort`.

`ort-cuda`: for kernels of the CUDA provider. The slots of the cache are counted by the caller. A
sum and the norm after it are one kernel.
"""

from pathlib import Path

import numpy as np
import onnx_ir as ir

from posenc_export.encodings.rope_dynamic import RoPEDynamic
from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export.quantization.grid import Codes, Grid
from posenc_export.export.targets import (
    by_distance,
    cached_attention,
    content,
    experts,
    onnx_growing,
    ort_slots,
    standard,
)
from posenc_export.export.targets.builder import FLOAT, MICROSOFT, Builder, Table
from posenc_export.export.targets.onnx_file import FILE_NAME, Lowerings, write_onnx
from posenc_export.export.targets.weights import ROUNDED, Fused, InHalf
from posenc_export.export.trace import Source, transposed
from posenc_export.ops import graph
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import cuda_placement, kernel_library
from posenc_export.runtime.graphs.kernel_library import OPERATOR
from posenc_export.shared.refusal import refusal

# Nodes that are not merged into GroupQueryAttention.
LATER = (graph.Mask, graph.Rotate)
# Inputs of a block in products of the library: a multiple, the most, and of a block for each row.
STRIP, LARGEST_BLOCK, LARGEST_ROW = 32, 256, 1 << 16  # product.h
# Nodes whose place an input of the operator may take.
LATER_NATIVELY = (
    *(graph.Distances, graph.LayersOfRatio, graph.Pick, graph.SuffixSum),
    *(graph.SumsBetween, graph.WaveProducts),
)
# Tokens of a prompt in one run of a model without scores in memory: few launches of large kernels.
# A bias takes [H,chunk,T].
CHUNK = 1024


def wave_products(op: Builder, node: graph.WaveProducts) -> ir.Value:
    """Use that slots of compact rows have consecutive positions."""
    if not ort_slots.in_slots(op, node.k_positions):
        return content.wave_products(op, node)
    first, total = op.input("first_position"), ort_slots.total(op)
    return content.consecutive_wave_products(op, node, first, total)


def rows_at_counts(op: Builder, node: graph.RowsAtCounts) -> ir.Value:
    """Count only the last keys of a cache if that is enough. Fused attention would cache rotated
    keys by slot, but queries are rotated by position here.
    """
    append = graph.Append.of(node.keys)
    if append is None or op.dtype != "float32" or graph.Rotate.of(append.new):
        return content.rows_at_counts(op, node)
    node.node.replace_input_with(1, None)  # no longer a reader of the cache
    return content.rows_at_last_counts(op, node, append, *ort_slots.written(op, append))


def distances(op: Builder, node: graph.Distances) -> ir.Value:
    """Subtract slots, exact in float32 below 2^24 and with fewer nodes than int64 positions."""
    if ort_slots.of_call(op, node.k_positions):
        return standard.distances(op, node)
    slots, queries = ort_slots.slots(op), ort_slots.cache_position(op)
    keys, queries = (op.Cast(value, to=FLOAT) for value in (slots, queries))
    return op.Sub(keys, op.Unsqueeze(queries, [1, 3]))


def append(op: Builder, node: graph.Append) -> ir.Value:
    """Write into the buffer in place; nodes that read all slots get a slice of the valid ones."""
    first, total = ort_slots.written(op, node)
    buffer = op.TensorScatter(node.past, op.Transpose(node.new, perm=[0, 2, 1, 3]), first, axis=2)
    valid = op.Slice(buffer, [0], total, [2])
    for reader, index in list(node.output.uses()):
        # Others than those which read only the slots that they are given.
        if reader.op_type not in ("GatherElements", OPERATOR):
            reader.replace_input_with(index, valid)
    return buffer


def transposed_product(op: Builder, node: ir.Node) -> ir.Value | None:
    """Fuse the product of x and a transposed constant matrix, such as a tied token table, to
    FusedMatMul, which reads the constant without transposing it.

    Otherwise ONNX Runtime stores a transposed copy of the constant whenever it loads the graph.
    """
    x, turned = node.inputs
    matrix = transposed(turned)
    if matrix is None or matrix.const_value is None or len(matrix.const_value.shape) != 2:
        return None
    return op.FusedMatMul(x, matrix, domain=MICROSOFT, transB=1)


LOWERING: tuple[Table, ...] = (
    {
        **{kind: emit for kind, emit in onnx_growing.LOWERING[0].items() if kind not in LATER},
        graph.AppendPositions: lambda op, of: ort_slots.key_positions(op),
        graph.Distances: distances,
        graph.Attend: cached_attention.attend,
        graph.WaveProducts: wave_products,
        graph.RowsAtCounts: rows_at_counts,
        graph.GatedDelta: content.fused_delta,
        graph.Experts: experts.sparse,
    },
    {graph.Append: append, **{kind: onnx_growing.LOWERING[0][kind] for kind in LATER}},
)
# A sum and the norm after it stay two nodes: on a CPU, SkipSimplifiedLayerNormalization of ONNX
# Runtime 1.31 takes 1.2 to 2.7 times as long as Add and RMSNormalization at widths of 576 and more,
# SkipLayerNormalization 1.7 to 7 times as long as Add and LayerNormalization. ONNX Runtime itself
# fuses BiasGelu and QuickGelu when it loads the graph.
FUSIONS = {"MatMul": transposed_product}


def rows_at_counts_natively(op: Builder, node: graph.RowsAtCounts) -> ir.Value:
    """Leave the counts to the operator if it can count; otherwise count all keys."""
    if not by_distance.counts_inside(op, node):
        return content.rows_at_counts(op, node)
    node.node.replace_input_with(1, None)  # no longer a reader of the cache
    inside = {"domain": graph.DOMAIN, "heads": node.heads, "kv_heads": node.kv_heads}
    return op.RowsAtCounts(None, None, None, node.rows, **inside)


class Native(Fused):
    """As Fused, with the product of the library where it has one."""

    def _domain(self, grid: Grid) -> str:
        block = grid.block or 0
        known = self.accuracy == ROUNDED and block % STRIP == 0 and block <= LARGEST_BLOCK
        return kernel_library.DOMAIN if known else super()._domain(grid)

    def _by_token(
        self, op: Builder, node: ir.Node, x: ir.Value | None, name: str, codes: Codes
    ) -> ir.Value:
        """As a product with one block of each row."""
        if codes.inputs % STRIP or codes.inputs > LARGEST_ROW:
            return super()._by_token(op, node, x, name, codes)
        sizes = {"K": codes.inputs, "N": len(codes.codes), "block_size": codes.inputs}
        sizes |= {"bits": 8, "accuracy_level": self.accuracy}
        stored = op.weight(f"{name}.codes", lambda: (codes.codes + np.int16(128)).astype(np.uint8))
        scales = op.weight(f"{name}.scales", lambda: codes.scales.copy())
        return op.MatMulNBits(x, stored, scales, domain=kernel_library.DOMAIN, **sizes)


NATIVE: tuple[Table, ...] = (
    {
        **{kind: lower for kind, lower in LOWERING[0].items() if kind not in LATER_NATIVELY},
        graph.Attend: cached_attention.attend_natively,
        graph.AttendTurnedKeys: cached_attention.attend_turned_keys,
        graph.RowsAtCounts: rows_at_counts_natively,
    },
    {kind: LOWERING[0][kind] for kind in LATER_NATIVELY},
    LOWERING[1],
)
NATIVE_LOWERINGS = Lowerings(NATIVE, Native, FUSIONS)


def write_native(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write the graph (onnx_file.write_onnx)."""
    written = write_onnx(source, manifest, folder, NATIVE_LOWERINGS)
    chunk, keys = written.chunk, [s for s in written.states if s.past.endswith(".key")]
    if chunk == RoPEDynamic.chunk and written.operators.get(OPERATOR) == len(keys):
        # The operator alone reads keys, and stores none that are turned for a query.
        chunk = PositionEncoding.chunk
    others = "GroupQueryAttention" in written.operators
    return written.replace(continuation_rows=int(others), chunk=chunk)


def sum_and_norm(op: Builder, node: ir.Node) -> ir.Value | None:
    """Fuse a sum of two values of one shape and the RMSNormalization that reads it. Since
    version 1.31 ONNX Runtime adds up the squares in float32 on CUDA.
    """
    total, scale = node.inputs
    addition = None if total is None else total.producer()
    if (
        total is None
        or addition is None
        or addition.op_type != "Add"
        or (scale is not None and scale.producer() is not None)  # which may read the sum's shape
        or not _of_one_shape(*addition.inputs)
        or node.attributes.get_int("axis", -1) != -1
    ):
        return None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    output, mean, deviation, added = op.several(
        4,
        "SkipSimplifiedLayerNormalization",
        *addition.inputs,
        scale,
        domain=MICROSOFT,
        epsilon=epsilon,
    )
    mean.name = deviation.name = ""  # for training
    added.shape, added.type = total.shape, total.type
    total.replace_all_uses_with(added, replace_graph_outputs=True)
    return output


def _of_one_shape(first: ir.Value | None, second: ir.Value | None) -> bool:
    if first is None or second is None or first.shape is None:
        return False
    return first.shape == second.shape and len(first.shape) == 3


CUDA: tuple[Table, ...] = ({**LOWERING[0], graph.Experts: experts.flat}, LOWERING[1])
CUDA_FUSIONS = {**FUSIONS, "RMSNormalization": sum_and_norm}
CUDA_LOWERINGS = Lowerings(CUDA, InHalf, CUDA_FUSIONS, on_device=True)


def write_cuda(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write the graph (onnx_file.write_onnx). ValueError: as for write_onnx; the CUDA provider has
    no kernel for a node, or one that refuses it.
    """
    written = write_onnx(source, manifest, folder, CUDA_LOWERINGS)
    if written.chunk == PositionEncoding.chunk and written.states and not written.input("slots"):
        written = written.replace(chunk=CHUNK)
    placement = cuda_placement.placed(folder / FILE_NAME)
    # In which a graph of half precision is verified on the CPU.
    if not placement.runs and manifest.dtype != "float32":
        rule = "a graph that ONNX Runtime's CUDA provider runs"
        remedy = "change the model, or choose target onnx-static or ort"
        got = f"one that {placement.said()}"
        raise refusal("export", f"{rule} for target {manifest.target}", got, remedy)
    return written
