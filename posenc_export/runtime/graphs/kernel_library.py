"""The library of custom operators that graphs of target ort-native need (packages/kernels)."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posenc_export.runtime.graphs import onnx_files
from posenc_export.shared.foreign import brief
from posenc_export.shared.refusal import refusal

DOMAIN, OPERATOR = onnx_files.KERNELS, "CachedAttention"
PRODUCT = "MatMulNBits"  # as that of com.microsoft, with activations in 8 bits
TARGET = "ort-native"
DISTRIBUTION = "posenc-export-kernels"
INSTALL = "pip install 'posenc-export[native]'"
VARIABLE = "POSENC_KERNELS"  # path of a library to use instead of the installed one
INSTRUCTIONS = "POSENC_INSTRUCTIONS"  # widest instruction set that the library uses (dispatch.h)
FILE = Path("posenc_export_kernels", "libposenc_kernels.so")
SOURCE_TREE = Path(__file__).parents[3]


def missing() -> ModuleNotFoundError:
    """Return the error for a graph that needs the library if it is not installed."""
    rule = f"runtime: expected {DISTRIBUTION} for target ort-native, got none"
    return ModuleNotFoundError(f"{rule}; {INSTALL}", name=FILE.parts[0])


def path() -> Path | None:
    """Return the library of POSENC_KERNELS, of `make kernels` in a source tree, or installed; None
    without one. Raise ValueError if POSENC_KERNELS names no file.
    """
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            remedy = f"build it by make kernels, or unset {VARIABLE}"
            raise refusal("runtime", f"{VARIABLE} to name a file", named, remedy)
        return Path(named)
    built = SOURCE_TREE / "build" / "kernels" / FILE
    if built.exists() and (SOURCE_TREE / "packages" / "kernels").is_dir():
        return built
    spec = find_spec(FILE.parts[0])
    installed = Path(spec.origin).parent / FILE.name if spec and spec.origin else None
    return installed if installed and installed.exists() else None


def register(options: Any) -> None:
    """Make the operators known to a session. Raise ModuleNotFoundError without them, ValueError if
    ONNX Runtime refuses the library, or POSENC_INSTRUCTIONS names an instruction set that this
    processor lacks.
    """
    library = path()
    if library is None:
        raise missing()
    try:
        options.register_custom_ops_library(str(library))
    except onnx_files.load_errors() as refused:
        _, named, rule = str(refused).partition(INSTRUCTIONS)
        if named:
            raise ValueError(f"runtime: expected {named}{rule}") from None
        rule = f"a {DISTRIBUTION} that ONNX Runtime {onnx_files.version()} loads"
        got, remedy = brief(refused), f"{INSTALL} --upgrade, or in a source tree make kernels"
        raise refusal("runtime", rule, got, remedy) from None
