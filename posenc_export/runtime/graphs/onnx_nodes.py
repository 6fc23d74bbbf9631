"""Read the nodes, constants and types of an ONNX file without the package onnx (onnx.proto)."""

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from posenc_export.runtime.graphs.onnx_files import fields

# TensorProto.DataType
TYPES = {
    1: "float", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    8: "string", 9: "bool", 10: "float16", 11: "double", 12: "uint32", 13: "uint64",
    16: "bfloat16", 21: "uint4", 22: "int4",
}  # fmt: skip
NUMPY = {"float": "<f4", "double": "<f8", "bfloat16": "<u2", "uint4": "u1", "int4": "u1"}
TYPED = (4, 5, 6, 7, 10, 11)  # fields of TensorProto that hold numbers in another form than raw
Parts = defaultdict[int, list[bytes]]


@dataclass(frozen=True)
class Constant:
    """A tensor that a graph stores."""

    name: str  # of the value; empty for the value of an attribute
    element: str  # element type, one of TYPES
    shape: tuple[int, ...]  # numbers of 4 bits count one by one
    content: bytes = b""  # its bytes, if they stand in the graph's file
    file: str = ""  # where they stand otherwise, from byte `offset` on
    offset: int = 0
    serialised: bytes = b""  # the TensorProto

    def array(self, folder: Path) -> np.ndarray:
        """Return the numbers, bfloat16 as float32, 4 bits in bytes. Raise ValueError or OSError."""
        dtype, count = np.dtype(NUMPY.get(self.element, self.element)), int(np.prod(self.shape))
        packed = self.element in ("uint4", "int4")
        stored = (count + 1) // 2 if packed else count
        if self.file and stored:
            numbers: np.ndarray = np.memmap(folder / self.file, dtype, "r", self.offset, (stored,))
        else:
            numbers = np.frombuffer(self.content, dtype)
        if numbers.size != stored:
            rule = f"expected {stored} numbers of constant {self.name}"
            raise ValueError(f"graph: {rule}, got {numbers.size}; export again")
        if packed:
            numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(-1)[:count]
            numbers = (numbers ^ 8).astype(np.int8) - 8 if self.element == "int4" else numbers
        if self.element == "bfloat16":
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(numbers).reshape(self.shape)


@dataclass
class Node:
    """A node of a graph."""

    domain: str = ""  # "" is the domain ai.onnx
    operator: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list)  # "" for an optional one that is left out
    outputs: list[str] = field(default_factory=list)
    # int, float, str, Constant, Nodes, or a list of numbers or strings, by name.
    attributes: dict[str, Any] = field(default_factory=dict)
    serialised: dict[str, bytes] = field(default_factory=dict)  # AttributeProtos by name

    @property
    def element(self) -> str:
        """Element type of the attribute `value`, of Constant and ConstantOfShape, or ""."""
        value = self.attributes.get("value")
        return value.element if isinstance(value, Constant) else ""

    @property
    def bodies(self) -> list["Nodes"]:
        """Subgraphs, such as the branches of If."""
        return [value for value in self.attributes.values() if isinstance(value, Nodes)]


@dataclass
class Nodes:
    """A graph."""

    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # element types by name
    constants: dict[str, Constant] = field(default_factory=dict)  # by name
    outputs: list[str] = field(default_factory=list)  # names
    opsets: dict[str, int] = field(default_factory=dict)  # by domain; of the outermost graph
    serialised: dict[str, bytes] = field(default_factory=dict)  # ValueInfoProtos by name

    def walk(self) -> Iterator[Node]:
        """Yield its nodes, each before those of its subgraphs."""
        for node in self.nodes:
            yield node
            for body in node.bodies:
                yield from body.walk()


def read_nodes(path: Path) -> Nodes:
    """Read the graph of a file. Raise ValueError if it is not a protocol buffer, or OSError."""
    return parsed(path.read_bytes())


def parsed(content: bytes) -> Nodes:
    """Return the graph of a ModelProto. Raise ValueError if it is not a protocol buffer."""
    parts = _parts(content)
    graph = _graph(_last(parts, 7))
    for entry in map(_parts, parts[8]):
        graph.opsets[_text(_last(entry, 1))] = _number(_last(entry, 2))
    return graph


def _parts(content: bytes) -> Parts:
    """Return the contents of the fields of a message by number. An integer has 8 bytes."""
    parts: Parts = defaultdict(list)
    for number, kind, start, end in fields(memoryview(content), 0, len(content)):
        integer = (start & (1 << 64) - 1).to_bytes(8, "little") if kind == 0 else b""
        parts[number].append(integer or content[start:end])
    return parts


def _last(parts: Parts, number: int) -> bytes:
    return parts[number][-1] if parts[number] else b""


def _number(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _graph(content: bytes) -> Nodes:
    parts = _parts(content)
    constants = map(_tensor, parts[5])
    described = [{_text(_last(_parts(part), 1)): part for part in parts[at]} for at in (11, 12)]
    return Nodes(
        [_node(part) for part in parts[1]],
        {name: element_of(part) for name, part in described[0].items()},
        {constant.name: constant for constant in constants},
        list(described[1]),
        serialised={**described[0], **described[1]},
    )


def _node(content: bytes) -> Node:
    parts = _parts(content)
    domain, operator, name = (_text(_last(parts, number)) for number in (7, 4, 3))
    inputs, outputs = (list(map(_text, parts[number])) for number in (1, 2))
    read = [(*_attribute(part), part) for part in parts[5]]
    attributes, serialised = {a: value for a, value, _ in read}, {a: part for a, _, part in read}
    return Node(domain, operator, name, inputs, outputs, attributes, serialised)


def _attribute(content: bytes) -> tuple[str, Any]:
    """Return name and value of an attribute; None for a type that no graph of this package has."""
    parts = _parts(content)
    readers: dict[int, Callable[[bytes], Any]] = {3: _number, 4: _text, 5: _tensor, 6: _graph}
    readers[2] = lambda content: struct.unpack("<f", content)[0]
    value: Any = next((read(parts[at][0]) for at, read in readers.items() if at in parts), None)
    if 7 in parts:
        value = [item for part in parts[7] for item in np.frombuffer(part, "<f4").tolist()]
    elif 8 in parts:
        value = [_number(part) for part in parts[8]]
    elif 9 in parts:
        value = [_text(part) for part in parts[9]]
    return _text(_last(parts, 1)), value


def _tensor(content: bytes) -> Constant:
    parts = _parts(content)
    name, element = _text(_last(parts, 8)), TYPES.get(_number(_last(parts, 2)), "other")
    if element != "string" and not parts.keys().isdisjoint(TYPED):
        raise ValueError(f"constant {name} whose numbers are not raw bytes")
    entries = map(_parts, parts[13])
    external = {_text(_last(entry, 1)): _text(_last(entry, 2)) for entry in entries}
    file, offset = external.get("location", ""), int(external.get("offset", "0"))
    shape = tuple(map(_number, parts[1]))
    return Constant(name, element, shape, _last(parts, 9), file, offset, content)


def element_of(described: bytes) -> str:
    """Return the element type of an input or output from its ValueInfoProto."""
    for number in (2, 1, 1):  # its type, of a tensor, of these elements
        described = _last(_parts(described), number)
    return TYPES.get(_number(described), "other")
