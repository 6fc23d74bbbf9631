"""The library of custom operators that artefacts of target ort-native need, for ONNX Runtime on
CPUs.
"""

from pathlib import Path

__version__ = "0.2.0"


def library() -> Path:
    """Return the path of the shared library, for SessionOptions.register_custom_ops_library."""
    return Path(__file__).with_name("libposenc_kernels.so")
