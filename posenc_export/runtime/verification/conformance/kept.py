"""Results of contracts that are kept on this machine, in a folder of the user."""

import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Optional, Tuple

import msgspec
import onnxruntime
from msgspec import Meta, Struct

from posenc_export.runtime.artefact import files, machine
from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.verification import decoding
from posenc_export.runtime.verification.conformance.trial import Kernel

HERE = Path(__file__).parent


class Kept(Struct, frozen=True, forbid_unknown_fields=True):
    """A contract that was kept."""

    contract: str  # `key`
    worst: Annotated[float, Meta(ge=0, le=1)]  # largest error over its bound


def folder() -> Path:
    """Return the folder of results. Raise OSError without a home."""
    return files.cache_folder() / "kernels"


def key(kernel: Kernel) -> str:
    """Return what a result depends on: the geometry, the code of contracts, the runtime, and the
    processor. Nothing of it comes from an artefact but the geometry.
    """
    native = kernel.nodes[-1].domain == kernel_library.DOMAIN
    return "\n".join((repr(kernel), *_here(), *(_library() if native else ())))


@functools.cache
def _here() -> Tuple[str, ...]:
    code = hashlib.sha256()
    graphs = Path(kernel_library.__file__).parent
    for path in sorted((*HERE.glob("*.py"), *graphs.glob("*.py"), Path(decoding.__file__))):
        code.update(path.read_bytes())
    build = f"onnxruntime {onnxruntime.__version__}, {onnxruntime.get_build_info()}"
    processor = f"{machine.processor()}, {os.cpu_count()} cores: {' '.join(machine.features())}"
    return f"contracts {code.hexdigest()}", build, "CPUExecutionProvider", processor


def _library() -> Tuple[str, ...]:
    path, widest = kernel_library.path(), os.environ.get(kernel_library.INSTRUCTIONS, "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path else "none"
    return f"library {digest}", f"instructions {widest}"


def known(key: str) -> Optional[float]:
    """Return the largest error over its bound of a contract that was kept; None if that is not
    known.
    """
    try:
        kept = msgspec.json.decode(_path(key).read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return None
    return kept.worst if kept.contract == key else None


def keep(key: str, worst: float) -> None:
    """Write the result of a contract that was kept, if the folder can be written."""
    with suppress(OSError):
        folder().mkdir(0o700, parents=True, exist_ok=True)
        files.replace(_path(key), msgspec.json.encode(Kept(key, worst)))


def _path(key: str) -> Path:
    return folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
