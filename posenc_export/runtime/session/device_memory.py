"""Copy and clear parts of CUDA memory with the CUDA runtime that ONNX Runtime has loaded."""

import ctypes
import functools
import sys
import threading
from typing import Any, Callable

import numpy as np

DEVICE_TO_HOST, DEVICE_TO_DEVICE = 2, 3  # cudaMemcpyKind
# Held by calls that use the device: while one thread captures a CUDA graph, others must not
# allocate memory or wait.
TURN = threading.RLock()


def copy(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int
) -> None:
    """Copy `height` pieces of `width` bytes between addresses; a piece begins `pitch` bytes after
    the one before it. Raise RuntimeError for an error of CUDA.
    """
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    ends = (pointer(target), size(target_pitch), pointer(source), size(source_pitch))
    _call("cudaMemcpy2D", *ends, size(width), size(height), DEVICE_TO_DEVICE)


def clear(address: int, pitch: int, width: int, height: int) -> None:
    """Set `height` pieces of `width` bytes to 0. Raise RuntimeError for an error of CUDA."""
    size = ctypes.c_size_t
    _call("cudaMemset2D", ctypes.c_void_p(address), size(pitch), 0, size(width), size(height))


def to_host(array: np.ndarray, source: int) -> Callable[[], None]:
    """Return a function that copies the content of an array, which must live as long, from an
    address on the device. It raises RuntimeError for an error of CUDA.
    """
    ends = (ctypes.c_void_p(array.ctypes.data), ctypes.c_void_p(source))
    size = ctypes.c_size_t(array.nbytes)
    # To memory of the host that is not pinned, it returns when the copy is complete.
    copy = _runtime().cudaMemcpy

    def fetch() -> None:
        _check("cudaMemcpy", copy(*ends, size, DEVICE_TO_HOST))

    return fetch


def _call(name: str, *arguments: Any) -> None:
    """Call a function, and wait: ONNX Runtime runs on another stream, which would not."""
    runtime = _runtime()
    with TURN:
        _check(name, getattr(runtime, name)(*arguments) or runtime.cudaStreamSynchronize(None))


def _check(name: str, error: int) -> None:
    if error:
        raise RuntimeError(f"session: expected {name} to succeed, got CUDA error {error}")


@functools.cache
def _runtime() -> Any:
    import onnxruntime

    major = onnxruntime.cuda_version.partition(".")[0]
    windows = sys.platform == "win32"
    return ctypes.CDLL(f"cudart64_{major}.dll" if windows else f"libcudart.so.{major}")
