"""Copy and clear parts of CUDA memory without a way over the host, with the CUDA runtime that ONNX Runtime has loaded."""

import ctypes
import functools
import sys
from typing import Any

DEVICE_TO_DEVICE = 3  # cudaMemcpyKind


def copy(target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int) -> None:
    """Copy `height` pieces of `width` bytes between addresses; a piece begins `pitch` bytes after the one before it.

    Raises:
        RuntimeError: CUDA returned an error.
    """
    sizes = [ctypes.c_size_t(size) for size in (source_pitch, width, height)]
    _call("cudaMemcpy2D", ctypes.c_void_p(target), ctypes.c_size_t(target_pitch), ctypes.c_void_p(source), *sizes, DEVICE_TO_DEVICE)


def clear(address: int, pitch: int, width: int, height: int) -> None:
    """Set `height` pieces of `width` bytes to 0.

    Raises:
        RuntimeError: CUDA returned an error.
    """
    _call("cudaMemset2D", ctypes.c_void_p(address), ctypes.c_size_t(pitch), 0, ctypes.c_size_t(width), ctypes.c_size_t(height))


def _call(name: str, *arguments: Any) -> None:
    """Call a function, and wait: ONNX Runtime runs on another stream, which would not."""
    runtime = _runtime()
    error = getattr(runtime, name)(*arguments) or runtime.cudaStreamSynchronize(None)
    if error:
        raise RuntimeError(f"session: expected {name} to succeed, got CUDA error {error}")


@functools.cache
def _runtime() -> Any:
    import onnxruntime

    major = onnxruntime.cuda_version.partition(".")[0]
    return ctypes.CDLL(f"cudart64_{major}.dll" if sys.platform == "win32" else f"libcudart.so.{major}")
