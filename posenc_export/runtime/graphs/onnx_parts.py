"""Write a part of an ONNX graph, or a graph with changed nodes, without the package onnx."""

import struct
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Collection, Iterable, List, Mapping, Sequence, Union

import numpy as np
import onnxruntime

from posenc_export.runtime.graphs import kernel_library, onnx_files
from posenc_export.runtime.graphs.onnx_nodes import TYPES, Constant, Node, Nodes

IR_VERSION = 10
FLOAT, INT, STRING, TENSOR, GRAPH, INTS = 1, 2, 3, 4, 5, 7  # AttributeProto.AttributeType
NONE: Mapping[str, Any] = MappingProxyType({})
ELEMENTS = {"float32": "float", "float64": "double"}  # names that differ from those of numpy


def with_attribute(
    node: Node, name: str, value: Union[int, float, str, Constant, Nodes, List[int]]
) -> Node:
    """Return a copy of a node with another value of an attribute."""
    if isinstance(value, Nodes):
        kind, stored = GRAPH, _bytes(6, _body(value))
    elif isinstance(value, Constant):
        kind, stored = TENSOR, _bytes(5, value.serialised)
    elif isinstance(value, str):
        kind, stored = STRING, _bytes(4, value.encode())
    elif isinstance(value, float):
        kind, stored = FLOAT, _varint(2 << 3 | 5) + struct.pack("<f", value)
    elif isinstance(value, list):
        kind, stored = INTS, b"".join(_integer(8, number) for number in value)
    else:
        kind, stored = INT, _integer(3, value)
    serialised = _bytes(1, name.encode()) + stored + _integer(20, kind)
    known, content = {**node.attributes, name: value}, {**node.serialised, name: serialised}
    return replace(node, attributes=known, serialised=content)


def without_attributes(node: Node, names: Collection[str]) -> Node:
    """Return a copy of a node without some attributes."""
    kept = {name: value for name, value in node.attributes.items() if name not in names}
    stored = {name: value for name, value in node.serialised.items() if name not in names}
    return replace(node, attributes=kept, serialised=stored)


def renamed(value: Constant, name: str) -> Constant:
    """Return a constant with another name."""
    serialised = _changed(value.serialised, {8: _bytes(8, name.encode())})
    return replace(value, name=name, serialised=serialised)


def in_float32(described: bytes) -> bytes:
    """Return the description of an input or output, a ValueInfoProto, with element type float."""
    kind = _content(described, 2)
    tensor = _changed(_content(kind, 1), {1: _integer(1, _code("float"))})
    return _changed(described, {2: _bytes(2, _changed(kind, {1: _bytes(1, tensor)}))})


def new_node(
    operator: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, Union[int, float, str, List[int]]] = NONE,
    domain: str = "",
) -> Node:
    """Return a node with attributes that are numbers, strings or lists of whole numbers."""
    node = Node(domain, operator, outputs[0], list(inputs), list(outputs))
    for name, value in attributes.items():
        node = with_attribute(node, name, value)
    return node


def constant(name: str, numbers: np.ndarray, element: str = "") -> Constant:
    """Return a constant with the numbers of an array. element: type of its elements, such as int4,
    if that is not the dtype of the array.
    """
    element = element or ELEMENTS.get(numbers.dtype.name, numbers.dtype.name)
    stored = np.ascontiguousarray(numbers)
    if element in ("int4", "uint4"):
        low, high = np.pad(stored.reshape(-1) & 15, (0, numbers.size % 2)).reshape(-1, 2).T
        stored = (low | high << 4).astype(np.uint8)
    raw = stored.tobytes()
    dims = b"".join(_integer(1, size) for size in numbers.shape)
    serialised = dims + _integer(2, _code(element)) + _bytes(8, name.encode()) + _bytes(9, raw)
    return Constant(name, element, numbers.shape, raw, serialised=serialised)


def constant_nodes(graph: Nodes) -> List[Node]:
    """Return the nodes that depend on constants only."""
    values = {"", *graph.constants}
    kept = []
    for node in graph.nodes:
        if values.issuperset(_reads(node)):
            kept.append(node)
            values.update(node.outputs)
    return kept


def serialised(
    graph: Nodes,
    nodes: Iterable[Node],
    outputs: Sequence[str],
    inputs: Sequence[str] = (),
    free: Mapping[str, str] = NONE,
) -> bytes:
    """Return a model of some nodes of a graph, in their order, with the constants that they read.

    Args:
        outputs: names of values that become outputs, of which those of the graph keep their types.
        inputs: names of inputs of the graph that the model keeps, also if no node reads them.
        free: element types of further inputs by name, which have any shape.
    """
    nodes = list(nodes)
    read = set(outputs) | {name for node in nodes for name in _reads(node)}
    content = [_bytes(1, _node(node)) for node in nodes]
    content.append(_bytes(2, b"part"))
    stored = [value.serialised for name, value in graph.constants.items() if name in read]
    content += [_bytes(5, constant) for constant in stored]
    kept = {*inputs, *read} - free.keys()
    content += [_bytes(11, graph.serialised[name]) for name in graph.inputs if name in kept]
    for name, element in free.items():
        kind = _bytes(2, _bytes(1, _integer(1, _code(element))))
        content.append(_bytes(11, _bytes(1, name.encode()) + kind))
    for name in outputs:
        described = graph.serialised.get(name, b"") if name in graph.outputs else b""
        content.append(_bytes(12, described or _bytes(1, name.encode())))
    versions = [(domain.encode(), version) for domain, version in graph.opsets.items()]
    opsets = [_bytes(8, _bytes(1, domain) + _integer(2, version)) for domain, version in versions]
    return _integer(1, IR_VERSION) + b"".join(opsets) + _bytes(7, b"".join(content))


def opened(model: bytes, folder: Path) -> Any:
    """Open a model on the CPU with one thread, so that sums always have the same order. folder: of
    the external data.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.enable_cpu_mem_arena = False  # an arena keeps the memory of the largest call
    options.add_session_config_entry(onnx_files.FOLDER, str(folder))
    if kernel_library.DOMAIN.encode() in model:
        kernel_library.register(options)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _reads(node: Node) -> List[str]:
    inner = [name for body in node.bodies for part in body.nodes for name in _reads(part)]
    return [*node.inputs, *inner, *(name for body in node.bodies for name in body.outputs)]


def _node(node: Node) -> bytes:
    parts = [_bytes(1, name.encode()) for name in node.inputs]
    parts += [_bytes(2, name.encode()) for name in node.outputs]
    parts += [_bytes(3, node.name.encode()), _bytes(4, node.operator.encode())]
    parts += [_bytes(5, attribute) for attribute in node.serialised.values()]
    parts += [_bytes(7, node.domain.encode())] if node.domain else []
    return b"".join(parts)


def _body(graph: Nodes) -> bytes:
    """Return a subgraph, a GraphProto."""
    content = [_bytes(1, _node(node)) for node in graph.nodes] + [_bytes(2, b"body")]
    content += [_bytes(5, value.serialised) for value in graph.constants.values()]
    content += [_bytes(11, graph.serialised[name]) for name in graph.inputs]
    content += [_bytes(12, graph.serialised[name]) for name in graph.outputs]
    return b"".join(content)


def _content(message: bytes, number: int) -> bytes:
    """Return the content of the first field of a message with this number; empty for none."""
    parts = onnx_files.fields(memoryview(message), 0, len(message))
    return next((message[start:end] for field, _, start, end in parts if field == number), b"")


def _changed(message: bytes, changes: Mapping[int, bytes]) -> bytes:
    """Return a message in which serialised fields replace those of the same numbers."""
    kept = [
        _integer(number, start) if kind == 0 else _bytes(number, message[start:end])
        for number, kind, start, end in onnx_files.fields(memoryview(message), 0, len(message))
        if number not in changes
    ]
    return b"".join([*kept, *changes.values()])


def _code(element: str) -> int:
    return next(code for code, known in TYPES.items() if known == element)


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value & (1 << 64) - 1)


def _bytes(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes(parts + bytes([value]))
