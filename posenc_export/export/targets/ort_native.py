"""Target `ort-native`: as `ort`, with the operator of packages/kernels in place of
GroupQueryAttention and of what stands before it: rotations by any table, biases by distance,
chunks, and several rows of several tokens over a cache. Nodes that it cannot represent are those of
`ort`.
"""

from pathlib import Path
from typing import Optional, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.encodings.rope_dynamic import RoPEDynamic
from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export.quantization.grid import Codes, Grid
from posenc_export.export.targets import (
    cached_attention,
    counts,
    ort,
    picked_rows,
)
from posenc_export.export.targets.builder import Builder
from posenc_export.export.targets.fused_weights import ROUNDED, Fused
from posenc_export.export.targets.onnx_file import Lowerings, write_onnx
from posenc_export.export.targets.rewriter import Table
from posenc_export.export.trace import Source
from posenc_export.ops import graph
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.kernel_library import OPERATOR

# Inputs of a block in products of the library: a multiple, the most, and of a block for each row.
STRIP, LARGEST_BLOCK, LARGEST_ROW = 32, 256, 1 << 16  # product.h


def rows_at_counts(op: Builder, node: graph.RowsAtCounts) -> ir.Value:
    """Leave the counts to the operator if it can count; otherwise count all keys."""
    if not picked_rows.counts_inside(op, node):
        return counts.rows_at_counts(op, node)
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
        self, op: Builder, node: ir.Node, x: Optional[ir.Value], name: str, codes: Codes
    ) -> ir.Value:
        """As a product with one block of each row."""
        if codes.inputs % STRIP or codes.inputs > LARGEST_ROW:
            return super()._by_token(op, node, x, name, codes)
        sizes = {"K": codes.inputs, "N": len(codes.codes), "block_size": codes.inputs}
        sizes |= {"bits": 8, "accuracy_level": self.accuracy}
        stored = op.weight(f"{name}.codes", lambda: (codes.codes + np.int16(128)).astype(np.uint8))
        scales = op.weight(f"{name}.scales", lambda: codes.scales.copy())
        return op.MatMulNBits(x, stored, scales, domain=kernel_library.DOMAIN, **sizes)


# Nodes whose place an input of the operator may take.
LATER = (
    *(graph.Distances, graph.LayersOfRatio, graph.Pick, graph.SuffixSum),
    *(graph.SumsBetween, graph.WaveProducts),
)
LOWERING: Tuple[Table, ...] = (
    {
        **{kind: lower for kind, lower in ort.LOWERING[0].items() if kind not in LATER},
        graph.Attend: cached_attention.attend_natively,
        graph.AttendTurnedKeys: cached_attention.attend_turned_keys,
        graph.RowsAtCounts: rows_at_counts,
    },
    {kind: ort.LOWERING[0][kind] for kind in LATER},
    ort.LOWERING[1],
)
LOWERINGS = Lowerings(LOWERING, Native, ort.FUSIONS)


def write(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write the graph (onnx_file.write_onnx)."""
    written = write_onnx(source, manifest, folder, LOWERINGS)
    chunk, keys = written.chunk, [s for s in written.states if s.past.endswith(".key")]
    if chunk == RoPEDynamic.chunk and written.operators.get(OPERATOR) == len(keys):
        # The operator alone reads keys, and stores none that are turned for a query.
        chunk = PositionEncoding.chunk
    others = "GroupQueryAttention" in written.operators
    return written.replace(continuation_rows=int(others), chunk=chunk)
