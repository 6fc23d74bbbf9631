"""Target `ort-native`: as `ort`, with the operator of packages/kernels in place of
GroupQueryAttention and of what stands before it: rotations by any table, biases by distance,
chunks, and several rows of several tokens over a cache. Nodes that it cannot represent are those of
`ort`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Tuple

from posenc_export.export.facts import Graph
from posenc_export.export.targets import native_attention, ort, ort_layers
from posenc_export.export.targets.fused_weights import Fused
from posenc_export.export.targets.onnx_file import Lowerings, write_onnx
from posenc_export.export.targets.rewriter import Table
from posenc_export.export.trace import Source
from posenc_export.ops import graph
from posenc_export.runtime.artefact.manifest import Manifest

LATER = (graph.Distances,)  # of which a table of the operator may take the place
LOWERING: Tuple[Table, ...] = (
    {
        **{kind: lower for kind, lower in ort.LOWERING[0].items() if kind not in LATER},
        graph.Attend: native_attention.attend,
    },
    {**ort.LOWERING[1], **{kind: ort.LOWERING[0][kind] for kind in LATER}},
)
LOWERINGS = Lowerings(LOWERING, Fused, ort_layers.FUSIONS)


def write(source: Source, manifest: Manifest, folder: Path) -> Graph:
    """Write the graph (onnx_file.write_onnx).

    Raises:
        ValueError: as for write_onnx.
    """
    graph = write_onnx(source, manifest, folder, LOWERINGS)
    others = "GroupQueryAttention" in graph.operators
    return replace(graph, continuation_rows=1 if others else 0)
