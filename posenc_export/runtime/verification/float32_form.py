"""The float32 form of an artefact that rounds activations: the same file, computed in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Collection, Iterator, Mapping

import msgspec
import numpy as np

from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.graphs.onnx_nodes import (
    TYPES,
    Constant,
    Node,
    Nodes,
    element_of,
    read_nodes,
)
from posenc_export.runtime.graphs.onnx_parts import (
    constant,
    in_float32,
    new_node,
    renamed,
    serialised,
    with_attribute,
    without_attributes,
)
from posenc_export.runtime.session.model import Model
from posenc_export.shared.refusal import refusal

MICROSOFT = "com.microsoft"
ROUNDED, FLOATS = 4, 1  # accuracy_level of MatMulNBits with activations in 8 bits, and in float32
# Attributes of GroupQueryAttention for caches of 8 bits, and the inputs before the scales.
CACHE_ATTRIBUTES = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")
BEFORE_SCALES = 12
INTEGERS = "MatMulIntegerToFloat"  # product of codes of 8 bits
HALF = ("float16", "bfloat16")
OF_TYPES = ("to", "dtype", "stash_type", "output_dtype")  # attributes that name an element type
FLOAT = next(code for code, name in TYPES.items() if name == "float")
HALF_CODES = tuple(code for code, name in TYPES.items() if name in HALF)


def load_form(folder: Path, manifest: Manifest, threads: int | None, rounds: bool = False) -> Model:
    """Load the float32 form of an artefact whose files were checked, on provider cpu. threads: per
    operator; None uses all cores. rounds: to bfloat16, where the file casts to it. Raise ValueError
    for a graph that cannot be loaded, or OSError.
    """
    described = _described(manifest)
    if manifest.in_torch:  # of an earlier version
        rule, got = f"float32 for target {manifest.target}", manifest.dtype
        raise refusal("verify", rule, got, "export it again")
    from posenc_export.runtime.graphs.ort_graph import OrtGraph

    path = folder / graph_file(manifest)
    graph = read_nodes(path)
    ends = {name for state in manifest.states for name in (state.past, state.present)}
    if manifest.dtype in HALF:
        graph = widened(_rounded(graph) if rounds else graph, ends)
    graph.nodes = list(_float_products(graph))
    if manifest.cache:
        graph = _with_float_caches(graph, manifest)
    content = serialised(graph, graph.nodes, graph.outputs, list(graph.inputs))
    return Model(OrtGraph(path, described, "cpu", threads, content=content), folder)


def _rounded(graph: Nodes) -> Nodes:
    """Return a graph whose casts to bfloat16 give these numbers in float32, up to 1e33: x keeps its
    first 8 bits in n - (n - x), where n is (2^16 + 1) x (Dekker's splitting). ONNX Runtime leaves
    out a cast to bfloat16 and back.
    """
    numbers = {"bfloat16.low": -1e33, "bfloat16.high": 1e33, "bfloat16.times": 65537}
    made = {name: constant(name, np.array(value, np.float32)) for name, value in numbers.items()}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.operator == "Cast" and node.attributes["to"] in HALF_CODES:
            x, within, n, rest = (f"{node.outputs[0]}.{part}" for part in "xwnr")
            nodes.append(_to_float(node.inputs[0], x))
            nodes.append(new_node("Clip", [x, "bfloat16.low", "bfloat16.high"], [within]))
            nodes.append(new_node("Mul", [within, "bfloat16.times"], [n]))
            nodes.append(new_node("Sub", [n, within], [rest]))
            node = new_node("Sub", [n, rest], node.outputs)
        nodes.append(node)
    return replace(graph, nodes=nodes, constants={**graph.constants, **made})


def _described(manifest: Manifest) -> Manifest:
    """Return the manifest of the form. Its dtype stays that of the inputs."""
    weights = manifest.weights
    return manifest.replace(
        outputs=[msgspec.structs.replace(value, dtype="float32") for value in manifest.outputs],
        states=[
            msgspec.structs.replace(state, dtype="float32")
            if state.dtype in (*HALF, *CACHE_FORMATS)
            else state
            for state in manifest.states
        ],
        weights=weights and msgspec.structs.replace(weights, activations="float32"),
        cache="",
    )


def _float_products(graph: Nodes) -> Iterator[Node]:
    """Yield the nodes of a graph, with products that read activations in float32.

    Weights of 8 bits are dequantized when the graph is loaded: MatMulNBits computes with them in
    float32 too, but takes 6 ms for a token and 0.8 M weights (ONNX Runtime 1.31).
    """
    sources = {node.outputs[0]: node for node in graph.nodes}
    integer = {node.outputs[0]: node for node in graph.nodes if node.operator == INTEGERS}
    for node in graph.nodes:
        if node.operator == "MatMulNBits" and node.attributes.get("bits") == 8:
            yield from _dequantized(graph, node)
        elif node.attributes.get("accuracy_level") == ROUNDED:
            plain = with_attribute(node, "accuracy_level", FLOATS)
            yield replace(plain, domain=MICROSOFT)  # the kernel library's rounds activations
        elif node.operator == "Mul" and node.inputs[0] in integer:
            product, weight = integer[node.inputs[0]], f"{node.outputs[0]}.weight"
            codes, scales = product.inputs[1], product.inputs[3]
            yield new_node("DequantizeLinear", [codes, scales], [weight], {"axis": 1})
            activations = sources[product.inputs[0]].inputs[0]  # of QuantizeLinear
            yield new_node("MatMul", [activations, weight], node.outputs)
        elif node.operator != INTEGERS:
            yield node


def _dequantized(graph: Nodes, node: Node) -> Iterator[Node]:
    """Yield nodes that compute MatMulNBits with 8 bits from a float32 weight [K,N]."""
    known, name = node.attributes, node.outputs[0]
    inputs, outputs, block = known["K"], known["N"], known["block_size"]
    blocks = -(-inputs // block)
    parts = {
        "rows": np.array([outputs, blocks * block]),
        "blocks": np.array([outputs, blocks]),
        "zeros": np.full((outputs, blocks), 128, np.uint8),  # of nodes without zero points
        "first": np.array([0]),
        "inputs": np.array([inputs]),
        "axis": np.array([1]),
    }
    named = {f"{name}.{part}": array for part, array in parts.items()}
    graph.constants |= {key: constant(key, array) for key, array in named.items()}
    zeros = node.inputs[3] if len(node.inputs) > 3 and node.inputs[3] else f"{name}.zeros"
    kept = [f"{name}.first", f"{name}.inputs", f"{name}.axis"]
    how = {"axis": 1, "block_size": block}
    yield new_node("Reshape", [node.inputs[1], f"{name}.rows"], [f"{name}.codes"])
    yield new_node("Reshape", [node.inputs[2], f"{name}.blocks"], [f"{name}.scales"])
    yield new_node("Reshape", [zeros, f"{name}.blocks"], [f"{name}.zero"])
    read = [f"{name}.codes", f"{name}.scales", f"{name}.zero"]
    yield new_node("DequantizeLinear", read, [f"{name}.padded"], how)
    yield new_node("Slice", [f"{name}.padded", *kept], [f"{name}.weight"])
    yield new_node("Transpose", [f"{name}.weight"], [f"{name}.turned"])
    yield new_node("MatMul", [node.inputs[0], f"{name}.turned"], node.outputs)


def _with_float_caches(graph: Nodes, manifest: Manifest) -> Nodes:
    """Return a graph whose cached keys and values are float32."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if "kv_cache_bit_width" in node.attributes:
            node = without_attributes(node, CACHE_ATTRIBUTES)
            scales = range(BEFORE_SCALES, BEFORE_SCALES + 2)
            inputs = ["" if at in scales else name for at, name in enumerate(node.inputs)]
            node = replace(node, inputs=inputs)
            while not node.inputs[-1]:
                node.inputs.pop()
        nodes.append(node)
    stored = [state for state in manifest.states if state.dtype == manifest.cache]
    names = [name for state in stored for name in (state.past, state.present)]
    described = {name: in_float32(graph.serialised[name]) for name in names}
    return replace(graph, nodes=nodes, serialised={**graph.serialised, **described})


def widened(graph: Nodes, states: Collection[str]) -> Nodes:
    """Return a graph in float32, with the inputs `states`. Other inputs keep their element types.
    Constants stay in half precision and are cast, once, when ONNX Runtime loads the graph.
    """
    cast = [name for name, kind in graph.inputs.items() if kind in HALF and name not in states]
    names = {name: f"{name}.float32" for name in cast}
    beginning = [_to_float(name, other) for name, other in names.items()]
    wide = _in_float32(graph, names)
    wide.nodes = beginning + wide.nodes
    for name in set(graph.inputs) & set(states):
        wide.serialised[name] = _value(graph, name)
    return wide


def _in_float32(graph: Nodes, names: Mapping[str, str]) -> Nodes:
    """Return a graph or body in float32. names: other names of the values that its nodes read."""
    constants: dict[str, Constant] = {}
    casts: list[Node] = []
    for name, value in graph.constants.items():
        half = value.element in HALF
        stored = renamed(value, f"{name}.half") if half else value
        constants[stored.name] = stored
        casts += [_to_float(stored.name, name)] if half else []
    outputs = {name: _value(graph, name) for name in graph.outputs}
    wide = [*casts, *(_wide_node(node, names) for node in graph.nodes)]
    described = {**graph.serialised, **outputs}
    return replace(graph, nodes=wide, constants=constants, serialised=described)


def _wide_node(node: Node, names: Mapping[str, str]) -> Node:
    node = replace(node, inputs=[names.get(name, name) for name in node.inputs])
    for name, value in list(node.attributes.items()):
        if isinstance(value, Nodes):
            node = with_attribute(node, name, _in_float32(value, names))
        elif isinstance(value, Constant) and value.element in HALF:
            node = with_attribute(node, name, constant("", value.array(Path()).astype(np.float32)))
        elif name in OF_TYPES and value in HALF_CODES:
            node = with_attribute(node, name, FLOAT)
    return node


def _to_float(name: str, other: str) -> Node:
    return new_node("Cast", [name], [other], {"to": FLOAT})


def _value(graph: Nodes, name: str) -> bytes:
    """Return the description of an input or output, with element type float if it was half."""
    described = graph.serialised[name]
    return in_float32(described) if element_of(described) in HALF else described
