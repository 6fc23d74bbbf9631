"""The library of custom operators that graphs of target ort-native need (packages/kernels)."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

DOMAIN, OPERATOR = "posenc.kernels", "CachedAttention"
DISTRIBUTION = "posenc-export-kernels"
INSTALL = "pip install 'posenc-export[native]'"
VARIABLE = "POSENC_KERNELS"  # path of a library to use instead of the installed one
FILE = Path("posenc_export_kernels", "libposenc_kernels.so")
SOURCE_TREE = Path(__file__).parents[3]


def missing() -> ModuleNotFoundError:
    """Return the error for a graph that needs the library if it is not installed."""
    rule = f"runtime: expected {DISTRIBUTION} for target ort-native, got none"
    return ModuleNotFoundError(f"{rule}; {INSTALL}", name=FILE.parts[0])


def path() -> Optional[Path]:
    """Return the library of POSENC_KERNELS, of `make kernels` in a source tree, or installed."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    built = SOURCE_TREE / "build" / "kernels" / FILE
    if built.exists() and (SOURCE_TREE / "packages" / "kernels").is_dir():
        return built
    spec = find_spec(FILE.parts[0])
    installed = Path(spec.origin).parent / FILE.name if spec and spec.origin else None
    return installed if installed and installed.exists() else None


def register(options: Any) -> None:
    """Make the operators known to a session; raise ModuleNotFoundError without them."""
    library = path()
    if library is None:
        raise missing()
    options.register_custom_ops_library(str(library))
