"""ONNX Runtime's CUDA provider: what keeps it from running on this machine, and its options."""

import contextlib
import ctypes
import functools
import io
import re
from pathlib import Path
from typing import NamedTuple

import onnxruntime

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.onnx_files import load_errors

NAME = "CUDAExecutionProvider"
REINSTALL = "pip install 'posenc-export[gpu]', or give provider cpu"
# Both distributions fill the same folder.
INSTALL = "pip uninstall onnxruntime, then pip install 'posenc-export[gpu]'"
OPTIONS = {
    # TF32, the default for products in float32, has a unit roundoff of 4.9e-4; the tolerance of
    # float32 is about 5e-5.
    "use_tf32": "0",
    # Flash, memory efficient and unfused attention. cuDNN's, otherwise preferred for prompts, keeps
    # a plan for every length without end.
    "sdpa_kernel": "19",
}
# Operators of our graphs whose CUDA kernels call cuDNN (onnxruntime-gpu 1.31.1).
CUDNN_OPERATORS = {"Conv", "GRU", "ReduceMax", "ReduceMin"}
# An ONNX model with the single node y = -x, float32 [1], of opset 13.
NEGATION = (
    b'\x08\x08:2\n\x0b\n\x01x\x12\x01y"\x03Neg\x12\x01gZ\x0f'
    b"\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n"
    b"\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
# In the order in which they are loaded
LIBRARIES = "libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so"
CUDNN = "libcudnn.so.9"
FAILURE = re.compile(r"CUDA failure \d+: [^;\n]*[^;\n ]")


class Obstacle(NamedTuple):
    """Why the provider cannot run here, and what to do about it."""

    cause: str
    remedy: str


@functools.cache
def obstacle() -> Obstacle | None:
    """Return what keeps the provider from running here, or None; loads the libraries of CUDA."""
    if NAME not in onnxruntime.get_available_providers():
        return Obstacle("an ONNX Runtime without it", INSTALL)
    with contextlib.redirect_stdout(io.StringIO()):  # preload_dlls prints what it does not find
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
    return _missing_library() or _failed_trial()


def cudnn_obstacle(manifest: Manifest) -> Obstacle | None:
    """Return why a graph that needs cuDNN cannot run here, or None; call `obstacle` first."""
    needing = sorted(CUDNN_OPERATORS.intersection(manifest.operators))
    try:
        if needing:
            ctypes.CDLL(CUDNN)
    except OSError:
        return Obstacle(f"no {CUDNN}, which operator {needing[0]} needs", REINSTALL)
    return None


def _missing_library() -> Obstacle | None:
    """Return which library is missing. ONNX Runtime would only print it."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    try:
        for name in LIBRARIES:
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        name = str(error).partition(":")[0].rpartition("/")[2]
        if name.startswith("libcuda."):
            remedy = "install the driver, or give provider cpu"
            return Obstacle(f"no driver of NVIDIA ({name})", remedy)
        return Obstacle(f"no {name}, a library that it needs", REINSTALL)
    return None


def _failed_trial() -> Obstacle | None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    remedy = "check the device with nvidia-smi, or give provider cpu"
    try:
        cuda = [(NAME, OPTIONS)]
        session = onnxruntime.InferenceSession(NEGATION, options, cuda, enable_fallback=0)
    except load_errors() as error:  # such as "CUDA failure 100: no CUDA-capable device is detected"
        match = FAILURE.search(str(error))
        return Obstacle(match[0] if match else str(error).splitlines()[0][:200], remedy)
    return None if NAME in session.get_providers() else Obstacle("a session without it", remedy)
