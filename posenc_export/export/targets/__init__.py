"""The writers of graphs, by target."""

import functools
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

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


def _onnx(*lowerings: Any) -> Write:
    return functools.partial(write_onnx, lowerings=Lowerings(*lowerings))


def runnable() -> Tuple[str, ...]:
    """Return the targets that what is installed can run: ort-native needs posenc-export-kernels."""
    return tuple(t for t in TARGETS if t != "ort-native" or kernel_library.path() is not None)


WRITERS: Dict[str, Write] = {
    "onnx": _onnx(onnx_growing.LOWERING, Standard),
    "onnx-static": _onnx(onnx_static.LOWERING, Standard),
    "ort": _onnx(ort.LOWERING, Fused, ort.FUSIONS),
    "ort-native": ort.write_native,
    "torchscript": write_torchscript,
    "pt2": write_pt2,
    "ort-cuda": ort.write_cuda,
}
