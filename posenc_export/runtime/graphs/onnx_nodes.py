"""Read the nodes and element types of an ONNX file without the package onnx."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

from posenc_export.runtime.graphs.onnx_files import fields

TYPES = {  # TensorProto.DataType
    1: "float", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool", 10: "float16", 11: "double", 12: "uint32",
    13: "uint64", 16: "bfloat16", 21: "uint4", 22: "int4",
}  # fmt: skip


@dataclass
class Node:
    """A node of a graph.

    Args:
        domain, operator: "" is the domain ai.onnx.
        inputs, outputs: names of values; "" for an optional one that is left out.
        numbers: integer attributes by name.
        element: element type of the attribute `value`, of Constant and ConstantOfShape; empty for none.
        bodies: subgraphs, such as the branches of If.
    """

    domain: str = ""
    operator: str = ""
    inputs: List[str] = field(default_factory=list)
    outputs: List[str] = field(default_factory=list)
    numbers: Dict[str, int] = field(default_factory=dict)
    element: str = ""
    bodies: List["Nodes"] = field(default_factory=list)


@dataclass
class Nodes:
    """A graph.

    Args:
        inputs: element types of inputs by name.
        constants: element type and shape of constants by name.
        outputs: names of outputs.
        opsets: version by domain; only of the outermost graph.
    """

    nodes: List[Node] = field(default_factory=list)
    inputs: Dict[str, str] = field(default_factory=dict)
    constants: Dict[str, Tuple[str, Tuple[int, ...]]] = field(default_factory=dict)
    outputs: List[str] = field(default_factory=list)
    opsets: Dict[str, int] = field(default_factory=dict)


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
    for number, kind, start, end in fields(memoryview(content), 0, len(content)):
        yield number, start.to_bytes(10, "little") if kind == 0 else content[start:end]


def _number(content: bytes) -> int:
    return int.from_bytes(content, "little")


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _graph(content: bytes) -> Nodes:
    graph = Nodes()
    for number, part in _of(content):
        if number == 1:
            graph.nodes.append(_node(part))
        elif number == 5:
            name, element, shape = _tensor(part)
            graph.constants[name] = element, shape
        elif number in (11, 12):
            name, element = _value(part)
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
        elif number == 4:
            node.operator = _text(part)
        elif number == 7:
            node.domain = _text(part)
        elif number == 5:
            _attribute(part, node)
    return node


def _attribute(content: bytes, node: Node) -> None:
    parts = dict(_of(content))
    if 3 in parts:
        node.numbers[_text(parts[1])] = _number(parts[3])
    if 5 in parts:
        node.element = _tensor(parts[5])[1]
    if 6 in parts:
        node.bodies.append(_graph(parts[6]))


def _tensor(content: bytes) -> Tuple[str, str, Tuple[int, ...]]:
    """Return name, element type and shape."""
    name, element, shape = "", "", []
    for number, part in _of(content):
        if number == 1:
            shape.append(_number(part))
        elif number == 2:
            element = TYPES.get(_number(part), "other")
        elif number == 8:
            name = _text(part)
    return name, element, tuple(shape)


def _value(content: bytes) -> Tuple[str, str]:
    """Return name and element type of a ValueInfoProto."""
    parts = dict(_of(content))
    tensor = dict(_of(parts.get(2, b""))).get(1, b"")
    return _text(parts[1]), TYPES.get(_number(dict(_of(tensor)).get(1, b"")), "other")
