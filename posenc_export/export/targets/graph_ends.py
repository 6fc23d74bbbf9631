"""Inputs and outputs of an ONNX graph, as in the manifest, and its remaining states."""

from typing import Iterable, List, Tuple

import msgspec
import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from posenc_export.export.graph_values import input_names, output_names
from posenc_export.export.targets.builder import Builder
from posenc_export.ops.graph import DOMAIN, AppendPositions, FitPositions
from posenc_export.runtime.artefact.manifest import Manifest, State, Value
from posenc_export.runtime.artefact.rules import present_axes
from posenc_export.runtime.graphs import kernel_library


def name(graph: ir.Graph, manifest: Manifest) -> None:
    """Give graph inputs, in order, the names and shapes of the manifest."""
    assert len(graph.outputs) == len(output_names(manifest))
    axes = {value.name: value.axes for value in (*manifest.inputs, *manifest.encoder)}
    axes |= {state.past: state.axes for state in manifest.states}
    for value, of_manifest in zip(graph.inputs, input_names(manifest), strict=True):
        value.name, value.shape = of_manifest, ir.Shape(axes[of_manifest])


def cast(graph: ir.Graph, manifest: Manifest) -> None:
    """Cast inputs and output between the dtype of activations and the one they are passed in."""
    inner, outer = (ir.DataType[dtype] for dtype in (manifest.dtype.upper(), "FLOAT"))
    values = (*manifest.inputs, *manifest.encoder)
    passed = {value.name for value in values if value.dtype == manifest.passed_dtype}
    for value in graph.inputs:
        if value.name in passed:
            node = ir.node("Cast", [value], attributes={"to": int(inner)})
            value.replace_all_uses_with(node.outputs[0])
            node.replace_input_with(0, value)
            node.outputs[0].shape, node.outputs[0].type = value.shape, ir.TensorType(inner)
            value.type = ir.TensorType(outer)
            graph.insert_before(graph[0], node)
    node = ir.node("Cast", [graph.outputs[0]], attributes={"to": int(outer)})
    graph.append(node)
    graph.outputs[0] = node.outputs[0]


def count_past(graph: ir.Graph, manifest: Manifest) -> None:
    """Let nodes that read the number of cached tokens from the shape of a state, as a module does
    that reshapes its keys, count the positions of keys instead: memory of states written in place
    has more slots than tokens.
    """
    kinds = (AppendPositions.__name__, FitPositions.__name__)
    places = next((n for n in graph if n.domain == DOMAIN and n.op_type in kinds), None)
    in_place = {state.past: state.axis for state in manifest.states if state.in_place}
    read = [
        node
        for node in graph
        if node.op_type == "Shape"
        and (of := node.inputs[0]) is not None
        and node.attributes.get_int("start", 0) == in_place.get(str(of.name))
    ]
    if places is None or not read:
        return
    axis = {"start": 1, "end": 2}
    keys, new = (ir.node("Shape", [of], axis) for of in (places.outputs[0], graph.inputs[0]))
    past = ir.node("Sub", [keys.outputs[0], new.outputs[0]])
    graph.insert_after(places, [keys, new, past])
    for node in read:
        node.outputs[0].replace_all_uses_with(past.outputs[0])
        graph.remove(node, safe=True)


def without_unread(op: Builder, manifest: Manifest) -> Tuple[List[Value], List[State]]:
    """Remove inputs that nothing reads, and their states; return inputs and states."""
    graph, count = op.graph, len(manifest.outputs)
    kept, outputs = [], list(graph.outputs)[:count]
    for state, value in zip(manifest.states, list(graph.outputs)[count:], strict=True):
        past = _named(graph.inputs, state.past)
        if past.uses():
            stored = _described(past)  # a lowering may widen a cache, or store it in another format
            window = op.windows.get(state.past, 0)
            changes = {"axes": stored.axes, "dtype": stored.dtype, "window": window}
            kept.append(msgspec.structs.replace(state, **changes))
            outputs.append(value)
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    present = [Value(state.present, state.dtype, present_axes(state)) for state in kept]
    for value, described in zip(outputs, [*manifest.outputs, *present], strict=True):
        dtype = ir.DataType.from_numpy(np.dtype(described.dtype))
        value.name, value.shape = described.name, ir.Shape(described.axes)
        value.type = ir.TensorType(dtype)
    common.RemoveUnusedNodesPass()(op.model)
    for value in list(graph.inputs)[1:]:
        if not value.uses():
            graph.inputs.remove(value)
    hidden = [_reads_hidden(graph, state, manifest) for state in kept]
    pairs = zip(kept, hidden, strict=True)
    kept = [msgspec.structs.replace(state, reads_hidden=reads) for state, reads in pairs]
    others = {*(state.past for state in kept), *(value.name for value in manifest.encoder)}
    return [_described(value) for value in graph.inputs if value.name not in others], kept


def _named(values: Iterable[ir.Value], wanted: str) -> ir.Value:
    return next(value for value in values if value.name == wanted)


def _described(value: ir.Value) -> Value:
    assert value.name is not None and value.dtype is not None and value.shape is not None
    axes = tuple(axis if isinstance(axis, int) else str(axis.value) for axis in value.shape)
    return Value(value.name, value.dtype.numpy().name, axes)


def _reads_hidden(graph: ir.Graph, state: State, manifest: Manifest) -> bool:
    """Return whether a node reads slots beyond a row's length, unlike GroupQueryAttention."""
    if manifest.layout != "rows" or state.update != "in_place":
        return True
    present = _named(graph.outputs, state.present)
    readers = _named(graph.inputs, state.past).uses()
    return bool(present.uses()) or any(not _stops_at_length(node) for node, _ in readers)


def _stops_at_length(node: ir.Node) -> bool:
    """Return whether a node reads no slot beyond a row's length, or only writes slots."""
    return node.op_type in ("GroupQueryAttention", kernel_library.OPERATOR) or (
        node.op_type == "TensorScatter" and not node.outputs[0].uses()
    )
