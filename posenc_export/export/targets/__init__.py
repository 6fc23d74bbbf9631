"""The targets, by name: what each writes and how its caches behave."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

from posenc_export.export.describe import TORCH
from posenc_export.export.onnx_file import write_onnx
from posenc_export.export.pt2_file import write_pt2
from posenc_export.export.source import Source
from posenc_export.export.targets import onnx_growing, onnx_static, ort, ort_layers
from posenc_export.export.targets.fewer_bits import Fused, Standard
from posenc_export.export.torchscript_file import write_torchscript
from posenc_export.runtime.manifest import Manifest


@dataclass(frozen=True)
class Target:
    """One way to deploy.

    Args:
        graph: what the file holds, in a line.
        cache: how its caches behave, in a line.
        write: (source, manifest, folder) to the finished manifest.
        layout: of each signature, "rows" or "columns" (runtime.manifest).
        update: of its caches, "append" or "in_place".
        geometry: capacity_bucket, continuation_rows, contiguous of the manifest.
        dtypes: it can be written in, the usual one first.
        few_bits: whether it takes weights of few bits, in float32.
    """

    graph: str
    cache: str
    write: Callable[[Source, Manifest, Path], Manifest]
    layout: Dict[str, str]
    update: str
    geometry: Dict[str, Any]
    dtypes: Tuple[str, ...] = ("float32", "float16")
    few_bits: bool = False


COLUMNS = {"positions": "columns", "mask": "columns"}
ROWS = {"positions": "rows", "mask": "columns"}
BUCKET = 256  # slots; the cost of the standard operators follows the capacity, not the number of valid slots

TARGETS = {
    "onnx": Target(
        "ai.onnx operators, opset 23",
        "grows: past in, present out",
        lambda source, manifest, folder: write_onnx(source, manifest, onnx_growing.LOWERING, folder, Standard),
        COLUMNS,
        "append",
        {"capacity_bucket": 0, "continuation_rows": 0, "contiguous": False},
        few_bits=True,
    ),
    "onnx-static": Target(
        "ai.onnx operators, opset 24 (23 without caches)",
        "fixed capacity, in place, grown in buckets",
        lambda source, manifest, folder: write_onnx(source, manifest, onnx_static.LOWERING, folder, Standard),
        ROWS,
        "in_place",
        {"capacity_bucket": BUCKET, "continuation_rows": 0, "contiguous": False},
        few_bits=True,
    ),
    "ort": Target(
        "com.microsoft fused operators where exact",
        "fixed capacity, in place, cost of the valid length",
        lambda source, manifest, folder: write_onnx(source, manifest, ort.LOWERING, folder, Fused, ort_layers.FUSIONS),
        ROWS,
        "in_place",
        {"capacity_bucket": 0, "continuation_rows": 1, "contiguous": True},
        few_bits=True,
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
        {"positions": "rows"},  # torch.export cannot express that a mask is longer than its tokens by the length of the cache
        "in_place",
        TORCH,
    ),
    "ort-cuda": Target(
        "as ort, in half precision, for the CUDA provider",
        "fixed capacity on the device, in place",
        lambda source, manifest, folder: write_onnx(source, manifest, ort.LOWERING, folder, Fused, ort_layers.FUSIONS),
        {"positions": "rows"},  # its GroupQueryAttention reads lengths on the host: those computed from a mask on the device read as 0
        "in_place",
        {"capacity_bucket": 0, "continuation_rows": 1, "contiguous": True},
        ("float16",),  # GroupQueryAttention has no float32 kernel for CUDA
    ),
}
