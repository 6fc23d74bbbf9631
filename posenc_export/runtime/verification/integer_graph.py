"""Cut the integer part out of an ONNX graph: the nodes that positions, lengths and sizes determine.
The check "indices" proves claims on their values.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Iterator, Mapping, Sequence

import numpy as np

from posenc_export.runtime.graphs.kernel_library import OPERATOR
from posenc_export.runtime.graphs.onnx_nodes import Constant, Node, Nodes
from posenc_export.runtime.graphs.onnx_parts import opened, renamed, serialised

FLOATS = ("float", "float16", "bfloat16")
TOKENS = ("input_ids", "token_type_ids")  # integers that choose weights, not places
SIZES = ("Shape", "Size")
HALF = (10, 16)  # TensorProto.DataType of float16 and bfloat16
ATTENTIONS = ("GroupQueryAttention", OPERATOR, "Attention")
WITH_BODIES = ("If", "Loop", "Scan")
LAYER = re.compile(r"past_key_values\.(\d+)\.(?:key|value)\Z")
# Begins the names that `_inlined` gives to values of a branch.
BRANCH = re.compile(r"(\d+)\.(?:then|else)_branch\.")


@dataclass
class Findings:
    """Number of comparisons and proved claims; by place, failures, and reasons for what is open."""

    compared: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Use:
    """A node that reads a value of the integer part and does not belong to it."""

    operator: str  # operator of the node; "output" for an output of the graph
    input: int  # index of the input; -1 for an output of the graph
    layer: int = -1  # layer of the attention that the node belongs to; -1 for none
    # Whether its first input is an input of the graph, such as a cache, or a slice of one
    on_state: bool = False
    starts: str = ""  # if it is a slice, name of its start along the axis that the node changes


@dataclass
class IntegerPart:
    """The integer part of a graph."""

    graph: Nodes  # the whole graph without subgraphs
    nodes: list[Node] = field(default_factory=list)  # nodes of the part, in order
    # Readers of each value that leaves the part
    uses: dict[str, list[Use]] = field(default_factory=dict)
    # By name of an index, the tables that Gather reads with it and that are equal in all calls
    tables: dict[str, list[str]] = field(default_factory=dict)
    # Names of other values whose shape the part reads, and whether they are embedded tokens [B,S,E]
    free: dict[str, bool] = field(default_factory=dict)
    # Attention nodes and their layers, in order
    attention: list[tuple[Node, int]] = field(default_factory=list)
    # By name of a value cast to half precision, which numpy may not have: the value before the cast
    casts: dict[str, str] = field(default_factory=dict)

    def after(self, name: str) -> tuple[set[str], list[Node]]:
        """Return a value with all values that the part computes from it, and their nodes."""
        values, nodes = {name}, []
        for node in self.nodes:
            if values.intersection(node.inputs):
                values.update(node.outputs)
                nodes.append(node)
        return values, nodes

    def layers_after(self, name: str) -> list[int]:
        """Return the layers that read a value, or a value that the part computes from it."""
        values, _ = self.after(name)
        return sorted({use.layer for v in values for use in self.uses.get(v, []) if use.layer >= 0})


def without_bodies(graph: Nodes) -> Nodes:
    """Return a graph without subgraphs: their nodes, of all branches of If, precede the node of the
    subgraph. Its attribute becomes the names of the subgraph's outputs. Inputs of the bodies of
    Loop and Scan become values that no node computes.
    """
    constants = dict(graph.constants)
    nodes = list(_inlined(graph.nodes, constants, {}, ""))
    return replace(graph, nodes=nodes, constants=constants)


def _inlined(
    nodes: Sequence[Node], constants: dict[str, Constant], names: Mapping[str, str], prefix: str
) -> Iterator[Node]:
    """Yield nodes with their subgraphs before them. names: new names of values of a subgraph."""
    for number, node in enumerate(nodes):
        attributes = dict(node.attributes)
        for attribute, body in node.attributes.items():
            if not isinstance(body, Nodes):
                continue
            inner = f"{prefix}{number}.{attribute}."
            own = {*body.inputs, *body.constants}
            own |= {name for part in body.nodes for name in part.outputs}
            within = {**names, **{name: inner + name for name in own if name}}
            for name, value in body.constants.items():
                constants[inner + name] = value
            yield from _inlined(body.nodes, constants, within, inner)
            attributes[attribute] = [within.get(name, name) for name in body.outputs]
        inputs, outputs = ([names.get(n, n) for n in ends] for ends in (node.inputs, node.outputs))
        bodies = {k for k, value in node.attributes.items() if isinstance(value, Nodes)}
        kept = {k: part for k, part in node.serialised.items() if k not in bodies}
        node = replace(node, inputs=inputs, outputs=outputs)
        yield replace(node, attributes=attributes, serialised=kept)


def integer_part(whole: Nodes) -> IntegerPart:
    """Cut the integer part out of a graph: nodes that read integers, shapes and constants only."""
    graph = without_bodies(whole)
    part = IntegerPart(graph)
    integers = {n for n, e in graph.inputs.items() if e not in FLOATS and n not in TOKENS}
    embedded = {name for node in graph.nodes if "input_ids" in node.inputs for name in node.outputs}
    varying, known, layers = set(integers), {"", *integers, *graph.constants}, _layers(graph)
    slices = {node.outputs[0]: node for node in graph.nodes if node.operator == "Slice"}
    for node in graph.nodes:
        # The part does not compute the results of a node whose subgraphs were taken out.
        computed = known.issuperset(node.inputs) and node.operator not in WITH_BODIES
        if not (node.operator in SIZES or computed):
            _leave(part, node, varying, layers, slices)
            continue
        part.nodes.append(node)
        if node.operator == "Cast" and node.attributes.get("to") in HALF:
            part.casts[node.outputs[0]] = node.inputs[0]
        known.update(node.outputs)
        if node.operator in SIZES and node.inputs[0] not in known - set(node.outputs):
            if node.inputs[0] not in graph.inputs:
                part.free[node.inputs[0]] = node.inputs[0] in embedded
        if node.operator in SIZES or varying.intersection(node.inputs):
            varying.update(node.outputs)
        if node.operator in ("Gather", "GatherND") and node.inputs[0] not in varying:
            stored = graph.constants.get(node.inputs[0])
            if node.inputs[1] in varying and (stored is None or stored.shape != (1,)):
                part.tables.setdefault(node.inputs[1], []).append(node.inputs[0])
    for name in graph.outputs:
        if name in varying and name in known:
            part.uses.setdefault(name, []).append(Use(f"output {name}", -1))
    return part


def _leave(
    part: IntegerPart,
    node: Node,
    varying: set[str],
    layers: Mapping[str, int],
    slices: Mapping[str, Node],
) -> None:
    layer = layers.get(node.outputs[0], -1)
    if node.operator in ATTENTIONS:
        part.attention.append((node, layer))
    changed, starts = (node.inputs or [""])[0], ""
    if changed in slices and len(slices[changed].inputs) == 4:  # a slice without steps
        source, starts, _, axes = slices[changed].inputs
        stored = part.graph.constants.get(axes)
        along = stored.array(Path())[:1].tolist() if stored and not stored.file else []
        changed = source if along == [node.attributes.get("axis")] else ""
    on_state = changed in part.graph.inputs
    for index, name in enumerate(node.inputs):
        if name in varying:
            use = Use(node.operator, index, layer, on_state, starts if on_state else "")
            part.uses.setdefault(part.casts.get(name, name), []).append(use)


def _layers(graph: Nodes) -> dict[str, int]:
    """Return the layer of each value: that of the next attention that reads it, or else of the
    attention before it. Attention has the layer of its caches. Without caches, layers are counted;
    those in the branches of an If, of which a call runs one, have the same numbers.
    """
    before: dict[str, int] = {}
    for name in graph.inputs:
        if match := LAYER.match(name):
            before[name] = int(match[1])
    cached, count, weighted = bool(before), 0, attention_weights(graph)
    first: dict[str, int] = {}  # by If, the first layer of its branches
    within: dict[str, int] = {}  # attention nodes in a branch so far
    for node in graph.nodes:
        read = () if node.operator in SIZES else _read(node)  # sizes of states serve all layers
        layer = max((before.get(name, -1) for name in read), default=-1)
        if not cached and node.outputs[0] in weighted:
            layer, branch = count, BRANCH.match(node.outputs[0])
            if branch:
                index = within.get(branch[0], 0)
                layer, within[branch[0]] = first.setdefault(branch[1], count) + index, index + 1
            count = max(count, layer + 1)
        before.update(dict.fromkeys(node.outputs, layer))
    layers = dict(before)
    after: dict[str, int] = {}  # by value, the first layer whose attention reads it
    for node in reversed(graph.nodes):
        readers = [after[name] for name in node.outputs if name in after]
        if node.outputs[0] in weighted:
            readers = [before[node.outputs[0]]]
        if readers:
            layers.update(dict.fromkeys(node.outputs, min(readers)))
            after.update({name: min(*readers, after.get(name, readers[0])) for name in _read(node)})
    return layers


def attention_weights(graph: Nodes) -> set[str]:
    """Return the outputs of nodes that compute attention weights. A softmax over products with
    constants, such as a router's, is none of them.
    """
    live, scores, outputs = set(graph.inputs), set[str](), set[str]()
    for node in graph.nodes:
        read = live.intersection(_read(node))
        if not read:
            continue
        live.update(node.outputs)
        if node.operator in ATTENTIONS or (node.operator == "Softmax" and read & scores):
            outputs.add(node.outputs[0])
        elif len(read) > 1 if "MatMul" in node.operator else read & scores:
            scores.update(node.outputs)
    return outputs


def _read(node: Node) -> list[str]:
    """Return the values that a node reads, with the outputs of its subgraphs."""
    bodies = node.attributes.values() if node.operator in WITH_BODIES else ()
    return [*node.inputs, *(name for body in bodies if isinstance(body, list) for name in body)]


def evaluated(
    part: IntegerPart, name: str, inputs: Mapping[str, np.ndarray], folder: Path
) -> np.ndarray:
    """Compute a value of a part with ONNX Runtime from the inputs of the graph. Other values that
    the part reads are zeros of shape [1,1,1]. Raise OSError if constants cannot be read.
    """
    needed, nodes = {name}, []
    for node in reversed(part.nodes):
        if needed.intersection(node.outputs):
            nodes.append(node)
            needed.update(node.inputs)
    made = {output for node in nodes for output in node.outputs}
    read = sorted(needed - made - part.graph.constants.keys() - {""})
    free = {n: part.graph.inputs.get(n, "float") for n in read}
    free = {n: "float" if element in FLOATS else element for n, element in free.items()}
    stored = part.graph.constants.items()
    constants = {n: renamed(value, n) for n, value in stored if n in needed}
    graph = replace(part.graph, constants=constants)
    session = opened(serialised(graph, reversed(nodes), [name], free=free), folder)
    nothing = np.zeros((1, 1, 1), np.float32)
    (value,) = session.run([name], {n: inputs.get(n, nothing) for n in read})
    return np.asarray(value)
