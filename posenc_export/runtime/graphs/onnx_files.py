"""Check which files model.onnx reads before it is loaded, and shorten errors of loading it."""

import mmap
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.refusal import refusal

Buffer = bytes | mmap.mmap | memoryview
# For each message type of onnx.proto: the field numbers that lead to tensors, and the message type
# of each.
FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {},
}
# Source location and function signature at the start of a message of ONNX Runtime.
SIGNATURE = re.compile(r"/onnxruntime_src/\S+ .*?\) ")
FOLDER = "session.model_external_initializers_file_folder_path"  # for models that are no file
DEEPEST = 64  # levels of nested graphs
KERNELS = "posenc.kernels"  # domain of the operators of packages/kernels
OLDEST = "1.28"  # version of ONNX Runtime, as in pyproject.toml
NEWER = "pip install -U 'posenc-export[cpu]'"
LENGTHS = {1: 8, 5: 4}  # bytes of the fixed-length wire types


def check_external(path: Path, manifest: Manifest) -> None:
    """Raise ValueError unless a file is an ONNX model that reads only files of the manifest."""
    rule = f"runtime: expected {path.name} to"
    try:
        names = external_files(path)
    except ValueError as error:
        raise ValueError(f"{rule} be an ONNX model, got {error}; export again") from None
    for name in sorted(names - manifest.files.keys()):
        got = f"{name[:200]!r}; export again"
        raise ValueError(f"{rule} read files that the manifest lists, got {got}")


def external_files(path: Path) -> set[str]:
    """Return the external data files that an ONNX file names, or raise ValueError if it is none."""
    if not path.stat().st_size:
        raise ValueError("an empty file")
    with (
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return locations(content)


def locations(content: Buffer) -> set[str]:
    """Return the external data files that a ModelProto names, or raise ValueError if it is none."""
    with memoryview(content) as view:
        return set(_locations(view, 0, len(view), "model", 0))


def _locations(view: memoryview, at: int, end: int, message: str, depth: int) -> Iterator[str]:
    if depth > 4 * DEEPEST:
        raise ValueError("graphs that are nested too deeply")
    entry = {1: b"", 2: b""}
    for field, kind, start, stop in fields(view, at, end):
        if message == "entry" and kind and field in entry:
            entry[field] = bytes(view[start:stop])
        elif kind == 2 and field in FIELDS[message]:
            yield from _locations(view, start, stop, FIELDS[message][field], depth + 1)
    if entry[1] == b"location":
        yield entry[2].decode("utf-8", "replace")


def fields(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, and start and end of the content, or an integer twice, of the fields
    of the message at at .. end - 1. Raise ValueError if it is none.
    """
    while at < end:
        tag, at = _varint(view, at, end)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            number, at = _varint(view, at, end)
            yield field, kind, number, number
            continue
        if kind not in (2, *LENGTHS):
            raise ValueError(f"wire type {kind}")
        length, start = (LENGTHS[kind], at) if kind in LENGTHS else _varint(view, at, end)
        at = start + length
        if at > end:
            raise ValueError("a field that extends past the end of the file")
        yield field, kind, start, at


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """Read the variable-length integer at index `at`. Return it and the index after it."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("an integer that extends past the end of the file")
        byte = view[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise ValueError("an integer of more than ten bytes")


def load_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that ONNX Runtime raises while it loads or runs a graph."""
    from onnxruntime.capi import onnxruntime_pybind11_state as states

    kinds = [kind for kind in vars(states).values() if isinstance(kind, type)]
    own = [kind for kind in kinds if issubclass(kind, Exception)]
    return (UnicodeDecodeError, RuntimeError, *own)  # the first for names that are not UTF-8


def version() -> str:
    import onnxruntime

    return onnxruntime.__version__


def older(than: str) -> bool:
    """Return whether ONNX Runtime is older than a version MAJOR.MINOR."""
    return [*map(int, version().split(".")[:2])] < [*map(int, than.split("."))]


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn errors of ONNX Runtime while it loads a file into a ValueError of one line."""
    try:
        yield
    except load_errors() as error:
        reason = str(error).split(" : ", 3)[-1].replace(f"{path.parent}/", "")
        reason = (SIGNATURE.sub("", reason).strip() or type(error).__name__).splitlines()[0]
        rule, got = f"{path.name} to be a graph that ONNX Runtime loads", reason[:300]
        remedy = "export again, or with this version of ONNX Runtime"
        if older(OLDEST):
            rule, got, remedy = f"ONNX Runtime {OLDEST} or newer", version(), NEWER
        elif "opset" in reason.lower():
            remedy = f"it needs an ONNX Runtime newer than {version()}: {NEWER}"
        elif KERNELS in reason:
            remedy = "pip install -U 'posenc-export[native]', or in a source tree make kernels"
        raise refusal("runtime", rule, got, remedy) from None
