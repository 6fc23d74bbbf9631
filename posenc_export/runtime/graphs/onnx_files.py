"""Check that model.onnx reads only files that the manifest lists, before it is loaded; and turn load errors of ONNX Runtime into one-line messages."""

import mmap
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, Set, Tuple, Type, Union

from posenc_export.runtime.artefact.manifest import Manifest

Buffer = Union[bytes, mmap.mmap, memoryview]
REFUSALS = (  # exceptions in onnxruntime.capi.onnxruntime_pybind11_state
    "EngineError",
    "EPFail",
    "Fail",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "ModelLoadCanceled",
    "ModelLoaded",
    "ModelRequiresCompilation",
    "NoModel",
    "NoSuchFile",
    "NotFound",
    "NotImplemented",
    "RuntimeException",
)
# For each message type of onnx.proto: the field numbers that lead to tensors, and the message type of each.
FIELDS: Dict[str, Dict[int, str]] = {
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
SIGNATURE = re.compile(r"/onnxruntime_src/\S+ .*?\) ")  # source location and function signature at the start of a message of ONNX Runtime
DEEPEST = 64  # levels of nested graphs
LENGTHS = {1: 8, 5: 4}  # bytes of the fixed-length wire types


def check_external(path: Path, manifest: Manifest) -> None:
    """Check that a graph reads only files that the manifest lists, since only their digests are compared.

    Raises:
        ValueError: the graph names another file, or path is not an ONNX model.
    """
    with path.open("rb") as stream:
        if not path.stat().st_size:
            raise ValueError(f"runtime: expected {path.name} to be an ONNX model, got an empty file; export again")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                found = locations(content)
            except ValueError as error:
                raise ValueError(f"runtime: expected {path.name} to be an ONNX model, got {error}; export again") from None
    for name in sorted(found):
        if name not in manifest.files:
            raise ValueError(f"runtime: expected {path.name} to read files that the manifest lists, got {name[:200]!r}; export again")


def locations(content: Buffer) -> Set[str]:
    """Return the external data files that the tensors of a serialised ModelProto name.

    Raises:
        ValueError: the content is not a protocol buffer.
    """
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


def fields(view: memoryview, at: int, end: int) -> Iterator[Tuple[int, int, int, int]]:
    """Yield the fields of the message that a protocol buffer has at at .. end - 1: number, wire type, and start and end of the content, or an integer twice.

    Raises:
        ValueError: the content is not a protocol buffer.
    """
    while at < end:
        tag, at = _varint(view, at, end)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            number, at = _varint(view, at, end)
            yield field, kind, number, number
            continue
        length, start = (LENGTHS[kind], at) if kind in LENGTHS else _length(view, at, end, kind)
        at = start + length
        if at > end:
            raise ValueError("a field that extends past the end of the file")
        yield field, kind, start, at


def _length(view: memoryview, at: int, end: int, kind: int) -> Tuple[int, int]:
    if kind != 2:
        raise ValueError(f"wire type {kind}")
    return _varint(view, at, end)


def _varint(view: memoryview, at: int, end: int) -> Tuple[int, int]:
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


def load_errors() -> Tuple[Type[BaseException], ...]:
    """Return the exceptions that ONNX Runtime raises while it loads a graph. UnicodeDecodeError: the graph holds names that are not UTF-8."""
    from onnxruntime.capi import onnxruntime_pybind11_state as states  # imported here, because OpenVINO is used without it

    return (UnicodeDecodeError, RuntimeError, *(getattr(states, name) for name in REFUSALS))


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn errors of ONNX Runtime while loading a file into a ValueError of one line.

    Raises:
        ValueError: ONNX Runtime did not load the file; the message gives the first line of its reason.
    """
    try:
        yield
    except load_errors() as error:
        reason = SIGNATURE.sub("", str(error).split(" : ", 3)[-1].replace(f"{path.parent}/", "")).strip() or type(error).__name__
        reason = reason.splitlines()[0]
        rule, remedy = f"expected {path.name} to be a graph that ONNX Runtime loads", "export again, or with this version of ONNX Runtime"
        raise ValueError(f"runtime: {rule}, got {reason[:300]}; {remedy}") from None
