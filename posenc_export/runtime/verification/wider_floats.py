"""Write a graph of half precision as one that computes in float32, whose weights keep their values.

https://onnx.ai/onnx/operators/onnx__Cast.html describes the element types.
"""

from dataclasses import replace
from pathlib import Path
from typing import Collection, Dict, List, Mapping

import numpy as np

from posenc_export.runtime.graphs.onnx_nodes import TYPES, Constant, Node, Nodes, element_of
from posenc_export.runtime.graphs.onnx_parts import (
    constant,
    new_node,
    renamed,
    retyped,
    with_attribute,
)

HALF = ("float16", "bfloat16")
FLOAT = next(code for code, name in TYPES.items() if name == "float")
HALF_CODES = tuple(code for code, name in TYPES.items() if name in HALF)


def widened(graph: Nodes, states: Collection[str]) -> Nodes:
    """Return a graph in float32.

    Constants stay in half precision and are cast, which ONNX Runtime does once, when it loads the
    graph. Inputs other than states keep their element types too.

    Args:
        states: names of the inputs that become float32.
    """
    cast = [name for name, kind in graph.inputs.items() if kind in HALF and name not in states]
    names = {name: f"{name}.float32" for name in cast}
    beginning = [_to_float(name, other) for name, other in names.items()]
    wide = _in_float32(graph, names)
    wide.nodes = beginning + wide.nodes
    for name in set(graph.inputs) & set(states):
        wide.serialised[name] = _described(graph, name)
    return wide


def _in_float32(graph: Nodes, names: Mapping[str, str]) -> Nodes:
    """Return a graph or subgraph whose nodes, constants and outputs are float32.

    Args:
        names: other names of the values that nodes read.
    """
    constants: Dict[str, Constant] = {}
    casts: List[Node] = []
    for name, value in graph.constants.items():
        half = value.element in HALF
        stored = renamed(value, f"{name}.half") if half else value
        constants[stored.name] = stored
        casts += [_to_float(stored.name, name)] if half else []
    outputs = {name: _described(graph, name) for name in graph.outputs}
    return replace(
        graph,
        nodes=[*casts, *(_wide_node(node, names) for node in graph.nodes)],
        constants=constants,
        serialised={**graph.serialised, **outputs},
    )


def _wide_node(node: Node, names: Mapping[str, str]) -> Node:
    node = replace(node, inputs=[names.get(name, name) for name in node.inputs])
    for name, value in list(node.attributes.items()):
        if isinstance(value, Nodes):
            node = with_attribute(node, name, _in_float32(value, names))
        elif isinstance(value, Constant) and value.element in HALF:
            node = with_attribute(node, name, constant("", value.array(Path()).astype(np.float32)))
        elif name == "to" and value in HALF_CODES:
            node = with_attribute(node, name, FLOAT)
    return node


def _to_float(name: str, other: str) -> Node:
    return new_node("Cast", [name], [other], {"to": FLOAT})


def _described(graph: Nodes, name: str) -> bytes:
    """Return the description of an input or output, with element type float if it was half."""
    described = graph.serialised[name]
    return retyped(described, "float") if element_of(described) in HALF else described
