"""The writers of graphs, by target."""

from functools import partial
from pathlib import Path
from typing import Callable

from posenc_export.export.targets import onnx_growing, onnx_static, ort
from posenc_export.export.targets.onnx_file import Lowerings, write_onnx
from posenc_export.export.targets.torch_files import write_pt2, write_torchscript
from posenc_export.export.targets.weights import Fused, Standard
from posenc_export.export.trace import Source
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.schema import TARGETS
from posenc_export.runtime.graphs import kernel_library

# Writes the files of a graph to a folder. Takes the manifest of the model (describe.describe), and
# returns that of its graph. ValueError: the target cannot represent the module.
Write = Callable[[Source, Manifest, Path], Manifest]


def runnable() -> tuple[str, ...]:
    """Return the targets that what is installed can run: ort-native needs posenc-export-kernels."""
    return tuple(t for t in TARGETS if t != "ort-native" or kernel_library.path() is not None)


WRITERS: dict[str, Write] = {
    "onnx": partial(write_onnx, lowerings=Lowerings(onnx_growing.LOWERING, Standard)),
    "onnx-static": partial(write_onnx, lowerings=Lowerings(onnx_static.LOWERING, Standard)),
    "ort": partial(write_onnx, lowerings=Lowerings(ort.LOWERING, Fused, ort.FUSIONS)),
    "ort-native": ort.write_native,
    "torchscript": write_torchscript,
    "pt2": write_pt2,
    "ort-cuda": ort.write_cuda,
}
