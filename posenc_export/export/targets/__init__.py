"""The export targets by name: how each one writes its graph, and how its caches are updated."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

from posenc_export.export.describe import TORCH
from posenc_export.export.targets import onnx_growing, onnx_static, ort, ort_cuda, ort_layers
from posenc_export.export.targets.onnx_file import write_onnx
from posenc_export.export.targets.pt2_file import write_pt2
from posenc_export.export.targets.quantized_weights import Fused, Standard
from posenc_export.export.targets.torchscript_file import write_torchscript
from posenc_export.export.trace import Source
from posenc_export.runtime.artefact.manifest import Manifest


@dataclass(frozen=True)
class Target:
    """Properties of one export target.

    Args:
        graph: description of the graph, in one line.
        cache: description of the caches, in one line.
        write: writes the graph; takes (source, manifest, folder) and returns the completed
            manifest.
        layout: "rows" or "columns" (runtime.artefact.manifest), by signature.
        update: update rule of the caches, "append" or "in_place".
        geometry: the manifest's capacity_bucket, continuation_rows and contiguous.
        dtypes: supported dtypes, the default first.
        few_bits: supports quantized weights with float32 activations.
        int8_cache: supports 8-bit caches with float32 activations.
        keeps: supports blocks of quantized weights with offsets.
        mixes: supports a size, since the bytes of weights are known before the graph is written
            (quantization/mixed.py).
    """

    graph: str
    cache: str
    write: Callable[[Source, Manifest, Path], Manifest]
    layout: Dict[str, str]
    update: str
    geometry: Dict[str, Any]
    dtypes: Tuple[str, ...] = ("float32", "float16")
    few_bits: bool = False
    int8_cache: bool = False
    keeps: bool = False
    mixes: bool = False


COLUMNS = {"positions": "columns", "mask": "columns"}
ROWS = {"positions": "rows", "mask": "columns"}
# Slots; small, because the cost of standard operators depends on the capacity instead of the number
# of valid slots.
BUCKET = 256

TARGETS = {
    "onnx": Target(
        "ai.onnx operators, opset 23",
        "grows: past in, present out",
        lambda source, manifest, folder: write_onnx(
            source, manifest, onnx_growing.LOWERING, folder, Standard
        ),
        COLUMNS,
        "append",
        {"capacity_bucket": 0, "continuation_rows": 0, "contiguous": False},
        few_bits=True,
    ),
    "onnx-static": Target(
        "ai.onnx operators, opset 24 (23 without caches)",
        "fixed capacity, in place, grown in buckets",
        lambda source, manifest, folder: write_onnx(
            source, manifest, onnx_static.LOWERING, folder, Standard
        ),
        ROWS,
        "in_place",
        {"capacity_bucket": BUCKET, "continuation_rows": 0, "contiguous": False},
        few_bits=True,
    ),
    "ort": Target(
        "com.microsoft fused operators where exact",
        "fixed capacity, in place, cost of the valid length",
        lambda source, manifest, folder: write_onnx(
            source, manifest, ort.LOWERING, folder, Fused, ort_layers.FUSIONS
        ),
        ROWS,
        "in_place",
        {"capacity_bucket": 0, "continuation_rows": 1, "contiguous": True},
        few_bits=True,
        int8_cache=True,
        keeps=True,
        mixes=True,
    ),
    "torchscript": Target(
        "scripted and frozen module",
        "tensors written in place, cost of the valid length",
        write_torchscript,
        ROWS,
        "in_place",
        TORCH,
    ),
    "pt2": Target(
        "torch.export program",
        "tensors written in place, cost of the valid length",
        write_pt2,
        ROWS,
        "in_place",
        TORCH,
    ),
    "ort-cuda": Target(
        "as ort, in half precision, for the CUDA provider",
        "fixed capacity on the device, in place",
        ort_cuda.write,
        # No "mask": GroupQueryAttention reads lengths on the host, where lengths computed on the
        # device are 0.
        {"positions": "rows"},
        "in_place",
        {"capacity_bucket": 0, "continuation_rows": 1, "contiguous": True},
        ("float16", "bfloat16"),  # GroupQueryAttention has no float32 kernel for CUDA
    ),
}
