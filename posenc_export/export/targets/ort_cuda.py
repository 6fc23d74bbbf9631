"""Target `ort-cuda`: as `ort`, for kernels of the CUDA provider. The slots of the cache are counted
by the caller. A sum and the norm after it are one kernel.
"""

from pathlib import Path
from typing import Optional, Tuple

import onnx_ir as ir

from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export.targets import (
    cached_attention,
    experts,
    ort,
    standard,
)
from posenc_export.export.targets.builder import MICROSOFT, Builder
from posenc_export.export.targets.cuda_weights import InHalf
from posenc_export.export.targets.onnx_file import FILE_NAME, Lowerings, write_onnx
from posenc_export.export.targets.rewriter import Replaced, Table
from posenc_export.export.trace import Source
from posenc_export.ops import graph
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import cuda_placement
from posenc_export.shared.refusal import refusal

# Tokens of a prompt in one run of a model without scores in memory: few launches of large kernels.
# A bias takes [H,chunk,T].
CHUNK = 1024


def attend(op: Builder, node: graph.Attend) -> ir.Value:
    """As `cached_attention.attend`; sinks beside a bias, which GroupQueryAttention refuses on CUDA,
    take standard operators.
    """
    mask = graph.Mask.of(node.mask)
    biased = node.content is not None or (mask is not None and (mask.bias or mask.chunk))
    refused = node.sinks is not None and biased
    return standard.attend(op, node) if refused else cached_attention.attend(op, node)


def sum_and_norm(op: Builder, node: ir.Node) -> Replaced:
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
        return []
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
    return [(node.outputs[0], output), (total, added)]


def _of_one_shape(first: Optional[ir.Value], second: Optional[ir.Value]) -> bool:
    if first is None or second is None or first.shape is None:
        return False
    return first.shape == second.shape and len(first.shape) == 3


LOWERING: Tuple[Table, ...] = (
    {
        **ort.LOWERING[0],
        graph.Attend: attend,
        graph.Experts: experts.flat,
    },
    ort.LOWERING[1],
)
FUSIONS = {**ort.FUSIONS, "RMSNormalization": sum_and_norm}
LOWERINGS = Lowerings(LOWERING, InHalf, FUSIONS, on_device=True)


def write(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write the graph (onnx_file.write_onnx). ValueError: as for write_onnx; the CUDA provider has
    no kernel for a node, or one that refuses it.
    """
    written = write_onnx(source, manifest, folder, LOWERINGS)
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
