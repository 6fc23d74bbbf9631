"""Write a part of an ONNX graph, or a graph with changed nodes, without the package onnx."""

import struct
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Collection, Iterable, Mapping, Sequence

import numpy as np
import onnxruntime

from posenc_export.runtime.graphs import kernel_library, onnx_files
from posenc_export.runtime.graphs.onnx_nodes import TYPES, Constant, Node, Nodes

IR_VERSION = 10
FLOAT, INT, STRING, TENSOR, GRAPH, INTS = 1, 2, 3, 4, 5, 7  # AttributeProto.AttributeType
NONE: Mapping[str, Any] = MappingProxyType({})
ELEMENTS = {"float32": "float", "float64": "double"}  # names that differ from those of numpy


def with_attribute(
    node: Node, name: str, value: int | float | str | Constant | Nodes | list[int]
) -> Node:
    """Return a copy of a node with another value of an attribute."""
    if isinstance(value, Nodes):
        given = [value.serialised[name] for name in value.inputs]
        made = [value.serialised[name] for name in value.outputs]
        kind, stored = GRAPH, _bytes(6, _graph(value.nodes, value.constants.values(), given, made))
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
    # Of a field that stands twice, the last one counts, and parts of messages are joined.
    return replace(value, name=name, serialised=value.serialised + _bytes(8, name.encode()))


def in_float32(described: bytes) -> bytes:
    """Return the description of an input or output, a ValueInfoProto, with element type float."""
    return described + _bytes(2, _bytes(1, _integer(1, _code("float"))))


def new_node(
    operator: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, int | float | str | list[int]] = NONE,
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


def constant_nodes(graph: Nodes) -> list[Node]:
    """Return the nodes that depend on constants only."""
    values = {"", *graph.constants}
    kept = []
    for node in graph.nodes:
        if values.issuperset(reads(node)):
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
    read = set(outputs) | {name for node in nodes for name in reads(node)}
    constants = [value for name, value in graph.constants.items() if name in read]
    kept = {*inputs, *read} - free.keys()
    taken = [graph.serialised[name] for name in graph.inputs if name in kept]
    for name, element in free.items():
        kind = _bytes(2, _bytes(1, _integer(1, _code(element))))
        taken.append(_bytes(1, name.encode()) + kind)
    known = {name: graph.serialised.get(name) for name in graph.outputs}
    given = [known.get(name) or _bytes(1, name.encode()) for name in outputs]
    versions = [(domain.encode(), version) for domain, version in graph.opsets.items()]
    opsets = [_bytes(8, _bytes(1, domain) + _integer(2, version)) for domain, version in versions]
    content = _graph(nodes, constants, taken, given)
    return _integer(1, IR_VERSION) + b"".join(opsets) + _bytes(7, content)


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


def reads(node: Node) -> list[str]:
    """Return the names of the values that a node and its subgraphs read."""
    inner = [name for body in node.bodies for part in body.nodes for name in reads(part)]
    return [*node.inputs, *inner, *(name for body in node.bodies for name in body.outputs)]


def _node(node: Node) -> bytes:
    parts = [_bytes(1, name.encode()) for name in node.inputs]
    parts += [_bytes(2, name.encode()) for name in node.outputs]
    parts += [_bytes(3, node.name.encode()), _bytes(4, node.operator.encode())]
    parts += [_bytes(5, attribute) for attribute in node.serialised.values()]
    parts += [_bytes(7, node.domain.encode())] if node.domain else []
    return b"".join(parts)


def _graph(
    nodes: Iterable[Node], constants: Iterable[Constant], inputs: Sequence, outputs: Sequence
) -> bytes:
    """Return a GraphProto. inputs, outputs: ValueInfoProtos."""
    stored = [value.serialised for value in constants]
    parts = {1: map(_node, nodes), 2: [b"part"], 5: stored, 11: inputs, 12: outputs}
    return b"".join(_bytes(number, part) for number, some in parts.items() for part in some)


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
