"""Read the nodes, constants and types of an ONNX file without the package onnx (onnx.proto)."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

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


@dataclass(frozen=True)
class Constant:
    """A tensor that a graph stores.

    Args:
        name: of the value; empty for the value of an attribute.
        element: element type, one of TYPES.
        shape: shape; numbers of 4 bits count one by one.
        content: its bytes, if they stand in the graph's file.
        file, offset: where they stand otherwise; file is empty if they stand in the graph's file.
        serialised: the TensorProto.
    """

    name: str
    element: str
    shape: Tuple[int, ...]
    content: bytes = b""
    file: str = ""
    offset: int = 0
    serialised: bytes = b""

    def array(self, folder: Path) -> np.ndarray:
        """Return the numbers. bfloat16 becomes float32, and 4 bits become int8 or uint8.

        Raises:
            ValueError: a tensor of strings, or of another size than its shape.
            OSError: the file cannot be read.
        """
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
    """A node of a graph.

    Args:
        domain, operator: "" is the domain ai.onnx.
        name: of the node.
        inputs, outputs: names of values; "" for an optional one that is left out.
        attributes: by name: int, float, str, Constant, Nodes, or a list of numbers or strings.
        serialised: the AttributeProto of each attribute, by name.
    """

    domain: str = ""
    operator: str = ""
    name: str = ""
    inputs: List[str] = field(default_factory=list)
    outputs: List[str] = field(default_factory=list)
    attributes: Dict[str, Any] = field(default_factory=dict)
    serialised: Dict[str, bytes] = field(default_factory=dict)

    @property
    def element(self) -> str:
        """Element type of the attribute `value`, of Constant and ConstantOfShape; empty for
        none.
        """
        value = self.attributes.get("value")
        return value.element if isinstance(value, Constant) else ""

    @property
    def bodies(self) -> List["Nodes"]:
        """Subgraphs, such as the branches of If."""
        return [value for value in self.attributes.values() if isinstance(value, Nodes)]


@dataclass
class Nodes:
    """A graph.

    Args:
        inputs: element types of inputs by name.
        constants: constants by name.
        outputs: names of outputs.
        opsets: version by domain; only of the outermost graph.
        serialised: ValueInfoProto of inputs and outputs, by name.
    """

    nodes: List[Node] = field(default_factory=list)
    inputs: Dict[str, str] = field(default_factory=dict)
    constants: Dict[str, Constant] = field(default_factory=dict)
    outputs: List[str] = field(default_factory=list)
    opsets: Dict[str, int] = field(default_factory=dict)
    serialised: Dict[str, bytes] = field(default_factory=dict)


def read(path: Path) -> Nodes:
    """Read the graph of a file.

    Raises:
        ValueError: the content is not a protocol buffer.
        OSError: the file cannot be read.
    """
    graph, opsets = Nodes(), {}
    for number, content in _of(path.read_bytes()):
        if number == 7:
            graph = _graph(content)
        elif number == 8:
            domain, version = "", 0
            for part, value in _of(content):
                domain, version = (_text(value), version) if part == 1 else (domain, _number(value))
            opsets[domain] = version
    graph.opsets = opsets
    return graph


def _of(content: bytes) -> Iterator[Tuple[int, bytes]]:
    """Yield the fields of a message: number, and content as bytes, of which an integer has 8."""
    view = memoryview(content)
    for number, kind, start, end in fields(view, 0, len(content)):
        if kind == 0:
            yield number, (start & (1 << 64) - 1).to_bytes(8, "little")
        else:
            yield number, content[start:end]


def _number(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)


def _float(content: bytes) -> float:
    return float(struct.unpack("<f", content)[0])


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _graph(content: bytes) -> Nodes:
    graph = Nodes()
    for number, part in _of(content):
        if number == 1:
            graph.nodes.append(_node(part))
        elif number == 5:
            constant = _tensor(part)
            graph.constants[constant.name] = constant
        elif number in (11, 12):
            name, element = _value(part)
            graph.serialised[name] = part
            if number == 11:
                graph.inputs[name] = element
            else:
                graph.outputs.append(name)
    return graph


def _node(content: bytes) -> Node:
    node = Node()
    for number, part in _of(content):
        if number in (1, 2):
            (node.inputs if number == 1 else node.outputs).append(_text(part))
        elif number == 3:
            node.name = _text(part)
        elif number == 4:
            node.operator = _text(part)
        elif number == 7:
            node.domain = _text(part)
        elif number == 5:
            name, value = _attribute(part)
            node.attributes[name], node.serialised[name] = value, part
    return node


def _attribute(content: bytes) -> Tuple[str, Any]:
    """Return name and value of an attribute; None for a type that no graph of this package has."""
    parts: Dict[int, List[bytes]] = {}
    for number, part in _of(content):
        parts.setdefault(number, []).append(part)
    readers = {2: _float, 3: _number, 4: _text, 5: _tensor, 6: _graph}
    value: Any = next((reader(parts[at][0]) for at, reader in readers.items() if at in parts), None)
    if 7 in parts:
        value = [item for part in parts[7] for item in np.frombuffer(part, "<f4").tolist()]
    elif 8 in parts:
        value = [_number(part) for part in parts[8]]
    elif 9 in parts:
        value = [_text(part) for part in parts[9]]
    return _text(parts[1][0]), value


def _tensor(content: bytes) -> Constant:
    name, element, shape, raw = "", "", [], b""
    external: Dict[str, str] = {}
    for number, part in _of(content):
        if number == 1:
            shape.append(_number(part))
        elif number == 2:
            element = TYPES.get(_number(part), "other")
        elif number == 8:
            name = _text(part)
        elif number == 9:
            raw = part
        elif number == 13:
            entry = dict(_of(part))
            external[_text(entry.get(1, b""))] = _text(entry.get(2, b""))
        elif number in TYPED and element != "string":
            raise ValueError(f"constant {name or number} whose numbers are not raw bytes")
    file, offset = external.get("location", ""), int(external.get("offset", "0"))
    return Constant(name, element, tuple(shape), raw, file, offset, content)


def _value(content: bytes) -> Tuple[str, str]:
    """Return name and element type of a ValueInfoProto."""
    return _text(dict(_of(content))[1]), element_of(content)


def element_of(described: bytes) -> str:
    """Return the element type of an input or output from its ValueInfoProto."""
    kind = dict(_of(described)).get(2, b"")
    tensor = dict(_of(kind)).get(1, b"")
    return TYPES.get(_number(dict(_of(tensor)).get(1, b"")), "other")
