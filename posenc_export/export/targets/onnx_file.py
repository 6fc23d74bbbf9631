"""Write model.onnx and model.onnx.data from a semantic graph: lower it for the target, strip it,
add doc strings, save it.
"""

import collections
import functools
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Mapping, Sequence

import msgspec
import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from posenc_export.export.targets import external_data, int8_cache
from posenc_export.export.targets.rewriter import (
    Builder,
    Fusion,
    Table,
    finish,
    fuse,
    lower,
    replace_nodes,
)
from posenc_export.export.trace import OPSET, Source
from posenc_export.runtime.artefact import files, meanings
from posenc_export.runtime.artefact.manifest import Manifest, State, Value
from posenc_export.runtime.artefact.rules import present_axes
from posenc_export.runtime.artefact.summary import summary
from posenc_export.shared.progress import Step, Steps
from posenc_export.shared.version import VERSION

FILE_NAME = "model.onnx"
IR_VERSION = 10  # ONNX Runtime 1.31 loads up to 13; 10 is what older releases load too
PRODUCER = "posenc_export"
SINCE = {"TensorScatter": 24}  # opset of operators that were added after OPSET


def write_onnx(
    source: Source,
    manifest: Manifest,
    lowering: Sequence[Table],
    folder: Path,
    few_bits: Callable[[str], Any],
    fusions: Mapping[str, Fusion] = MappingProxyType({}),
) -> Manifest:
    """Write folder/model.onnx and its external data; return the manifest with inputs, states,
    opset, operators and files of the graph.

    Args:
        lowering: the target's lowering tables, each applied to the whole graph before the next.
        few_bits: the target's nodes for quantized weights, used if the manifest has weights.
        fusions: the target's fusion table for patterns of standard nodes, applied to the lowered
            graph.

    Raises:
        ValueError: the target cannot represent the module.
    """
    graph_model = source.semantic(manifest)
    source.say(Step(f"{manifest.target}: lowering"))
    graph = graph_model.graph
    _name(graph, manifest)
    if manifest.passed_dtype != manifest.dtype:
        _cast_ends(graph, manifest)
    op = Builder(
        graph_model, manifest.dtype, manifest.max_positions, manifest.cache, source.on_grid
    )
    for table in lowering:
        lower(op, table)
    if manifest.weights is not None:
        manifest = _in_few_bits(op, manifest, few_bits)
    finish(op)
    if manifest.cache:
        int8_cache.store(op, manifest, source.cache_scales)
    fuse(op, fusions)
    manifest = _with_added(op, manifest)
    manifest = _drop_unread(graph_model, manifest)
    _strip(graph_model)
    _explain(graph_model, manifest)
    weights = external_data.move_out(
        graph, folder, functools.partial(Steps, source.say, f"{manifest.target}: writing weights")
    )
    written = {
        FILE_NAME: files.write(
            folder / FILE_NAME, ir.to_proto(graph_model).SerializeToString(deterministic=True)
        )
    }
    if weights is not None:
        written[external_data.WEIGHTS] = weights
    operators = collections.Counter(node.op_type for node in graph.all_nodes())
    return manifest.replace(
        opset=dict(graph_model.opset_imports),
        operators=dict(sorted(operators.items())),
        files=written,
    )


def _in_few_bits(op: Builder, manifest: Manifest, few_bits: Callable[[str], Any]) -> Manifest:
    """Replace rounded constants by their codes and scales, and record their number.

    Raises:
        ValueError: the model has no weights that are rounded.
    """
    assert manifest.weights is not None
    nodes = few_bits(manifest.weights.activations)
    replace_nodes(op, nodes.table())
    matrices = len(nodes.weights.stored)
    if not matrices:
        raise ValueError(
            "export: expected a model with linear layers or a token table for weights "
            f"{manifest.weights.format}, got one without; omit weights"
        )
    return manifest.replace(weights=msgspec.structs.replace(manifest.weights, matrices=matrices))


def _name(graph: ir.Graph, manifest: Manifest) -> None:
    """Give graph inputs, in order, the names and shapes of the manifest."""
    inputs = [
        *(value.name for value in manifest.inputs),
        *(state.past for state in manifest.states),
        *(value.name for value in manifest.encoder),
    ]
    outputs = [
        *(value.name for value in manifest.outputs),
        *(state.present for state in manifest.states),
    ]
    assert len(graph.inputs) == len(inputs) and len(graph.outputs) == len(outputs)
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = name
    axes = {
        **{value.name: value.axes for value in (*manifest.inputs, *manifest.encoder)},
        **{state.past: state.axes for state in manifest.states},
    }
    for value in graph.inputs:
        value.shape = ir.Shape(axes[str(value.name)])


def _cast_ends(graph: ir.Graph, manifest: Manifest) -> None:
    """Cast hidden states, encoder outputs and the output between the dtype of activations and
    the one in which they are passed.
    """
    inner, outer = (ir.DataType[name] for name in (manifest.dtype.upper(), "FLOAT"))
    passed = {
        value.name
        for value in (*manifest.inputs, *manifest.encoder)
        if value.dtype == manifest.passed_dtype
    }
    for value in graph.inputs:
        if value.name in passed:
            cast = ir.node("Cast", [value], attributes={"to": int(inner)})
            value.replace_all_uses_with(cast.outputs[0])
            cast.replace_input_with(0, value)
            cast.outputs[0].shape, cast.outputs[0].type, value.type = (
                value.shape,
                ir.TensorType(inner),
                ir.TensorType(outer),
            )
            graph.insert_before(graph[0], cast)
    cast = ir.node("Cast", [graph.outputs[0]], attributes={"to": int(outer)})
    graph.append(cast)
    graph.outputs[0] = cast.outputs[0]


def _with_added(op: Builder, manifest: Manifest) -> Manifest:
    """Add the caches that the lowering added to the outputs of the graph, and to the states of
    the manifest, each after the one it stands beside.
    """
    states, outputs = list(manifest.states), op.graph.outputs
    for beside, past, present in op.added:
        index = next(index for index, state in enumerate(states) if state.past == beside.name)
        described = _described(past)
        present_name = (
            f"{states[index].present.rpartition('.')[0]}.{described.name.rpartition('.')[2]}"
        )
        states.insert(
            index + 1,
            msgspec.structs.replace(
                states[index], past=described.name, present=present_name, axes=described.axes
            ),
        )
        outputs.insert(len(manifest.outputs) + index + 1, present)
    return manifest.replace(states=states)


def _drop_unread(model: ir.Model, manifest: Manifest) -> Manifest:
    """Remove inputs that the lowered graph does not read, and their states; return the manifest
    with the inputs that the lowering added.
    """
    graph = model.graph
    count = len(manifest.outputs)
    kept, outputs = [], list(graph.outputs)[:count]
    for state, value in zip(manifest.states, list(graph.outputs)[count:], strict=True):
        past = next(v for v in graph.inputs if v.name == state.past)
        if past.uses():
            found = _described(past)  # a lowering may widen a cache, or store it in 8 bits
            kept.append(msgspec.structs.replace(state, axes=found.axes, dtype=found.dtype))
            outputs.append(value)
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    present = [Value(state.present, state.dtype, present_axes(state)) for state in kept]
    for value, described in zip(outputs, [*manifest.outputs, *present], strict=True):
        value.name, value.shape, value.type = (
            described.name,
            ir.Shape(described.axes),
            ir.TensorType(ir.DataType.from_numpy(np.dtype(described.dtype))),
        )
    common.RemoveUnusedNodesPass()(model)
    for value in list(graph.inputs)[1:]:
        if not value.uses():
            graph.inputs.remove(value)
    kept = [
        msgspec.structs.replace(state, reads_hidden=_reads_hidden(graph, state, manifest))
        for state in kept
    ]
    others = {*(state.past for state in kept), *(value.name for value in manifest.encoder)}
    inputs = [_described(v) for v in graph.inputs if v.name not in others]
    return manifest.replace(inputs=inputs, states=kept)


def _described(value: ir.Value) -> Value:
    assert value.name is not None and value.dtype is not None and value.shape is not None
    return Value(
        value.name,
        value.dtype.numpy().name,
        tuple(a if isinstance(a, int) else str(a.value) for a in value.shape),
    )


def _reads_hidden(graph: ir.Graph, state: State, manifest: Manifest) -> bool:
    """Return whether a node reads cache slots beyond a row's length. GroupQueryAttention stops
    at seqlens_k; other operators read the whole cache.
    """
    if manifest.layout != "rows" or state.update != "in_place":
        return True
    past, present = (
        next(value for value in values if value.name == name)
        for values, name in ((graph.inputs, state.past), (graph.outputs, state.present))
    )
    return bool(present.uses()) or any(not _stops_at_length(node) for node, _ in past.uses())


def _stops_at_length(node: ir.Node) -> bool:
    """Return whether a node reads no slot beyond a row's length. A TensorScatter whose output no
    node reads only writes slots.
    """
    return node.op_type == "GroupQueryAttention" or (
        node.op_type == "TensorScatter" and not node.outputs[0].uses()
    )


def _strip(model: ir.Model) -> None:
    """Remove names, paths and metadata of the exporting machine, so that equal modules give
    equal files; set versions and opsets.
    """
    model.ir_version, model.producer_name, model.producer_version = IR_VERSION, PRODUCER, VERSION
    common.ClearMetadataAndDocStringPass()(model)
    model.doc_string, model.graph.name = None, "posenc"
    model.metadata_props.clear()
    domains: Dict[str, int] = {
        "": max([OPSET, *(SINCE.get(node.op_type, 0) for node in model.graph.all_nodes())])
    }
    boundary = {id(v) for v in (*model.graph.inputs, *model.graph.outputs)}
    for index, node in enumerate(model.graph.all_nodes()):
        node.name = f"{node.op_type}_{index}"
        if node.domain:
            domains[node.domain] = 1
        for value in node.outputs:
            value.metadata_props.clear()
            if id(value) not in boundary:
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.opset_imports.clear()
    model.opset_imports.update(domains)


def _explain(model: ir.Model, manifest: Manifest) -> None:
    """Write the summary and doc strings of inputs and outputs into the graph. The certificate is
    measured later and written to posenc.json.
    """
    facts = summary(manifest)
    model.doc_string = "; ".join(f"{title}: {text}" for title, text in facts.items())
    facts |= {"interface": str(manifest.interface), "certificate": "in posenc.json"}
    model.metadata_props.update({f"posenc.{title}": text for title, text in sorted(facts.items())})
    doc_strings = meanings.of_graph(manifest)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.doc_string = doc_strings.get(str(value.name))
