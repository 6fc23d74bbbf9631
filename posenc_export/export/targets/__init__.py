"""The export targets by name: how each one writes its graph and lays out its caches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Tuple

from posenc_export.export.describe import ROWS, TORCH, CacheLayout
from posenc_export.export.manifest_writer import Graph
from posenc_export.export.quantization.formats import FORMATS, KEEP, MIXED
from posenc_export.export.targets import (
    onnx_growing,
    onnx_static,
    ort,
    ort_cuda,
    ort_native,
)
from posenc_export.export.targets.fused_weights import Fused
from posenc_export.export.targets.onnx_file import Lowerings, write_onnx
from posenc_export.export.targets.pt2_file import write_pt2
from posenc_export.export.targets.standard_weights import Standard
from posenc_export.export.targets.torchscript_file import write_torchscript
from posenc_export.export.trace import Source
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import kernel_library

Write = Callable[[Source, Manifest, Path], Graph]


@dataclass(frozen=True, kw_only=True)
class Target(CacheLayout):
    """Properties of one export target, besides those of its caches."""

    graph: str  # description of the graph, in one line
    cache: str  # description of the caches, in one line
    write: Write  # writes the graph to a folder
    dtypes: Tuple[str, ...] = ("float32", "float16")  # supported dtypes, the default first
    # Formats of weights, with activations in `few_bits_dtypes`. KEEP has blocks with offsets; for
    # MIXED, the bytes of weights are known before the graph is written.
    formats: Tuple[str, ...] = ()

    @property
    def few_bits_dtypes(self) -> Tuple[str, ...]:
        """Dtypes of activations beside weights and caches of few bits."""
        return ("float32",) if "float32" in self.dtypes else self.dtypes


# Slots; small, because the cost of standard operators depends on the capacity instead of the number
# of valid slots.
BUCKET = 256


def _onnx(lowerings: Lowerings) -> Write:
    return lambda source, manifest, folder: write_onnx(source, manifest, folder, lowerings)


def _of_torch(graph: str, write: Write) -> Target:
    cache = "tensors written in place, cost of the valid length"
    return Target(graph=graph, cache=cache, write=write, dtypes=("float32",), **vars(TORCH))


def runnable() -> Tuple[str, ...]:
    """Return the targets that what is installed can run: ort-native needs posenc-export-kernels."""
    return tuple(t for t in TARGETS if t != "ort-native" or kernel_library.path() is not None)


TARGETS = {
    "onnx": Target(
        graph="ai.onnx operators, opset 23",
        cache="grows: past in, present out",
        write=_onnx(Lowerings(onnx_growing.LOWERING, Standard)),
        layout={"positions": "columns", "mask": "columns"},
        formats=tuple(FORMATS),
    ),
    "onnx-static": Target(
        graph="ai.onnx operators, opset 24 (23 without caches)",
        cache="fixed capacity, in place, grown in buckets",
        write=_onnx(Lowerings(onnx_static.LOWERING, Standard)),
        layout=ROWS,
        capacity_bucket=BUCKET,
        formats=tuple(FORMATS),
    ),
    "ort": Target(
        graph="com.microsoft fused operators where exact",
        cache="fixed capacity, in place, cost of the valid length",
        write=_onnx(Lowerings(ort.LOWERING, Fused, ort.FUSIONS)),
        layout=ROWS,
        continuation_rows=1,
        contiguous=True,
        formats=(*FORMATS, KEEP, MIXED),
    ),
    "ort-native": Target(
        graph="as ort, with the attention of posenc-export-kernels",
        cache="fixed capacity, in place, cost of the valid length",
        write=ort_native.write,
        layout={"positions": "rows"},
        contiguous=True,
        dtypes=("float32",),
        formats=(*FORMATS, KEEP, MIXED),
    ),
    "torchscript": _of_torch("scripted and frozen module", write_torchscript),
    "pt2": _of_torch("torch.export program", write_pt2),
    "ort-cuda": Target(
        graph="as ort, in half precision, for the CUDA provider",
        cache="fixed capacity on the device, in place",
        write=ort_cuda.write,
        # No "mask": GroupQueryAttention reads lengths on the host, where lengths computed on the
        # device are 0.
        layout={"positions": "rows"},
        continuation_rows=1,
        contiguous=True,
        dtypes=("float16", "bfloat16"),  # GroupQueryAttention has no float32 kernel for CUDA
        formats=(*FORMATS, KEEP),
    ),
}
