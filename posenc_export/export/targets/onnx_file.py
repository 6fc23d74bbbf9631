"""Write model.onnx and model.onnx.data: lower a semantic graph, name its inputs and outputs, store
small caches, strip, describe, save.
"""

import collections
import functools
import logging
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import msgspec
import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from posenc_export.encodings.shared.tables import levels_of
from posenc_export.export.describe import input_names, output_names
from posenc_export.export.signatures import wrap
from posenc_export.export.targets import standard
from posenc_export.export.targets.builder import (
    Builder,
    NodeLowering,
    Table,
    finish,
    lower,
    replace_nodes,
    size,
)
from posenc_export.export.trace import OPSET, Source
from posenc_export.ops.graph import DOMAIN, AppendPositions, FitPositions
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.artefact.graph_inputs import meanings_of
from posenc_export.runtime.artefact.manifest import Manifest, State, Value
from posenc_export.runtime.artefact.records import File, Weights
from posenc_export.runtime.artefact.rules import WEIGHTS, keys_and_values, present_axes
from posenc_export.runtime.artefact.schema import INTERFACE
from posenc_export.runtime.artefact.summary import summary
from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.quiet import quiet
from posenc_export.shared.progress import Step, Steps
from posenc_export.shared.refusal import refusal
from posenc_export.shared.version import VERSION

# Bytes, as in onnx.save_model; smaller tensors stay in the graph, where shape inference reads
# shapes, indices and scalars.
SMALL = 1024
PAGE = 4096  # bytes; tensors are page-aligned, so that each can be mapped into memory separately
BLOCK = 16 << 20  # bytes per copy of a tensor that is not contiguous in memory
PAST_KEY, PAST_VALUE, KEY_SCALE, VALUE_SCALE = 3, 4, 12, 13  # inputs of attention
QUANTISED: dict[str, Any] = {
    "k_quant_type": "PER_CHANNEL",
    "v_quant_type": "PER_CHANNEL",
    "kv_cache_bit_width": 8,
}
FILE_NAME = "model.onnx"
IR_VERSION = 10  # ONNX Runtime 1.31 loads up to 13; 10 is what older releases load too
PRODUCER = "posenc_export"
SINCE = {"TensorScatter": 24}  # opset of operators that were added after OPSET


def move_out(graph: ir.Graph, folder: Path, counted: Callable[[int, str], Steps]) -> File | None:
    """Move initialisers of at least SMALL bytes to folder/model.onnx.data, in graph order and
    page-aligned, and reference them from the graph.

    Args:
        counted: returns the report of a number of steps, from the number and what they are.

    Returns:
        The manifest's entry of the file, or None if no initialiser is large enough and no file was
        written.
    """
    large = [
        value
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes >= SMALL
    ]
    if not large:
        return None
    steps = counted(len(large), "tensors")
    with files.writing(folder / WEIGHTS) as stream:
        for value in large:
            tensor = value.const_value
            assert tensor is not None and value.name is not None
            stream.align(PAGE)
            offset = stream.bytes
            packed = tensor.dtype.bitwidth < 8  # tobytes packs 4-bit numbers in pairs
            if packed:
                stream.write(tensor.tobytes())
            else:
                write_array(stream, tensor.numpy())
            length, shape = stream.bytes - offset, ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                WEIGHTS, offset, length, tensor.dtype, shape=shape, name=value.name, base_dir=folder
            )
            steps.advance()
    return stream.entry()


def write_array(stream: files.Hashed, array: np.ndarray) -> None:
    """Write little-endian bytes in row-major order, without a copy of memory in this form."""
    count = 1 if array.flags.c_contiguous else array.nbytes // BLOCK + 1
    for part in np.array_split(array, count) if array.ndim else [array]:
        flat = np.ascontiguousarray(part, part.dtype.newbyteorder("<")).reshape(-1)
        stream.write(flat.view(np.uint8).data)


def name_inputs(graph: ir.Graph, manifest: Manifest) -> None:
    """Give graph inputs, in order, the names and shapes of the manifest."""
    assert len(graph.outputs) == len(output_names(manifest))
    axes = {value.name: value.axes for value in (*manifest.inputs, *manifest.encoder)}
    axes |= {state.past: state.axes for state in manifest.states}
    for value, of_manifest in zip(graph.inputs, input_names(manifest), strict=True):
        value.name, value.shape = of_manifest, ir.Shape(axes[of_manifest])


def cast_ends(graph: ir.Graph, manifest: Manifest) -> None:
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


def without_unread(op: Builder, manifest: Manifest) -> tuple[list[Value], list[State]]:
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
        value.name, value.shape = described.name, ir.Shape(described.axes)
        value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(described.dtype)))
    common.RemoveUnusedNodesPass()(op.model)
    for value in list(graph.inputs)[1:]:
        if not value.uses():
            graph.inputs.remove(value)
    hidden = [_reads_hidden(graph, state, manifest) for state in kept]
    pairs = zip(kept, hidden, strict=True)
    kept = [msgspec.structs.replace(state, reads_hidden=reads) for state, reads in pairs]
    others = {*(state.past for state in kept), *(value.name for value in manifest.encoder)}
    return [_described(value) for value in graph.inputs if value.name not in others], kept


def _named(values: Sequence[ir.Value], wanted: str) -> ir.Value:
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


def store_caches(op: Builder, manifest: Manifest, scales: Mapping[str, np.ndarray]) -> None:
    """Change the caches of keys and values to the format of the manifest in a lowered graph.

    Args:
        scales: of the channels [K,D] of each cache by its name, if the format has scales.

    Raises:
        ValueError: the graph has no cache of keys and values, or another operator than those of the
            format reads one.
    """
    format_, names = CACHE_FORMATS[manifest.cache], {s.past for s in keys_and_values(manifest)}
    caches = [value for value in op.graph.inputs if value.name in names and value.uses()]
    for value in caches:
        others = sorted({node.op_type for node, _ in value.uses()} - {*format_.operators})
        if others:
            _refuse_cache(manifest, f"{value.name} read by {', '.join(others)}")
        value.type = ir.TensorType(ir.DataType[manifest.cache.upper()])
    if not caches:
        _refuse_cache(manifest, "no cache of keys and values")
    for node in op.graph:
        if format_.scaled and node.op_type in format_.operators:
            node.resize_inputs(max(len(node.inputs), VALUE_SCALE + 1))
            for past, scale in ((PAST_KEY, KEY_SCALE), (PAST_VALUE, VALUE_SCALE)):
                node.replace_input_with(scale, _scales(op, node.inputs[past], scales))
            for name, value in QUANTISED.items():
                node.attributes[name] = ir.convenience.convert_attribute(name, value)


def _scales(op: Builder, past: Any, scales: Mapping[str, np.ndarray]) -> ir.Value:
    """Return the scales [K*D] of a cache."""
    missing = size(past, 3) - scales[past.name].shape[1]  # heads are padded with zeros
    padded = np.pad(scales[past.name], ((0, 0), (0, missing)), constant_values=1)
    return op.weight(f"{past.name}.scale", lambda: padded.reshape(-1))


def _refuse_cache(manifest: Manifest, got: str) -> None:
    format_, encoding = manifest.cache, summary(manifest)["encoding"]
    operators = " or ".join(CACHE_FORMATS[format_].operators)
    rule = f"export: expected every cache to be read by {operators} alone for cache {format_}"
    raise ValueError(f"{rule}, got {got} with encoding {encoding}; omit cache")


class Lowerings(NamedTuple):
    """How a target lowers a semantic graph."""

    tables: Sequence[Table]  # lowering tables, each applied to the whole graph before the next
    # Nodes for quantized weights; takes the dtype of activations in products.
    few_bits: Callable[[str], Any]
    # Fusions of standard nodes by operator, applied to the lowered graph.
    fusions: Mapping[str, NodeLowering] = MappingProxyType({})
    # Whether kernels of a device run the graph, for which the caller counts slots: Range and Slice
    # read sizes on the host, to which one that is computed on the device would be copied. Large
    # tables of rotations are then stored whole.
    on_device: bool = False


@quiet(logger="onnxscript", level=logging.WARNING)
@quiet(logger="onnx_ir", level=logging.WARNING)
def write_onnx(source: Source, manifest: Manifest, folder: Path, lowerings: Lowerings) -> Manifest:
    """Write folder/model.onnx and its external data (targets.Write)."""
    model = source.semantic(manifest)
    source.say(Step(f"{manifest.target}: lowering"))
    name_inputs(model.graph, manifest)
    count_past(model.graph, manifest)
    if manifest.passed_dtype != manifest.dtype:
        cast_ends(model.graph, manifest)
    module = wrap(source.model, manifest.signature)
    levels, sizes = {} if lowerings.on_device else levels_of(module), manifest.max_positions
    op = Builder(model, manifest.dtype, sizes, source.on_grid, levels, lowerings.on_device)
    replace_nodes(op, standard.NODES)
    for table in lowerings.tables:
        lower(op, table)
    weights = _in_few_bits(op, manifest, lowerings.few_bits)
    replace_nodes(op, lowerings.fusions)
    finish(op)
    if manifest.cache:
        store_caches(op, manifest, source.cache_scales)
    inputs, states = without_unread(op, manifest)
    _strip(model)
    operators = collections.Counter(node.op_type for node in model.graph.all_nodes())
    windowed = any(state.window for state in states)
    manifest = manifest.replace(
        inputs=inputs,
        states=states,
        interface=INTERFACE if windowed else manifest.interface,
        opset=dict(model.opset_imports),
        operators=dict(sorted(operators.items())),
        weights=weights,
    )
    _explain(model, manifest)
    steps = functools.partial(Steps, source.say, f"{manifest.target}: writing weights")
    moved = move_out(model.graph, folder, steps)
    content = ir.to_proto(model).SerializeToString(deterministic=True)
    written = {FILE_NAME: files.write(folder / FILE_NAME, content)}
    if moved is not None:
        written[WEIGHTS] = moved
    return manifest.replace(files=written)


def _in_few_bits(op: Builder, manifest: Manifest, few_bits: Callable[[str], Any]) -> Weights | None:
    """Replace rounded constants by their codes and scales; return the entry of the manifest, with
    their number. ValueError: the model has no weights that are rounded.
    """
    if manifest.weights is None:
        return None
    nodes = few_bits(manifest.weights.activations)
    replace_nodes(op, nodes.table())
    if not nodes.stored:
        rule = f"a model with linear layers or a token table for weights {manifest.weights.format}"
        raise refusal("export", rule, "one without", "omit weights")
    return msgspec.structs.replace(manifest.weights, matrices=len(nodes.stored))


def _strip(model: ir.Model) -> None:
    """Remove names, paths and metadata of this machine; set versions and opsets."""
    model.ir_version, model.producer_name, model.producer_version = IR_VERSION, PRODUCER, VERSION
    common.ClearMetadataAndDocStringPass()(model)
    model.doc_string, model.graph.name = None, "posenc"
    model.metadata_props.clear()
    opsets = [SINCE.get(node.op_type, 0) for node in model.graph.all_nodes()]
    domains: dict[str, int] = {"": max(OPSET, *opsets)}
    boundary = {id(v) for v in (*model.graph.inputs, *model.graph.outputs)}
    for index, node in enumerate(model.graph.all_nodes()):
        if node.name != standard.GAPS:  # an error names the node
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
    """Write summary and doc strings into the graph; the certificate follows in posenc.json."""
    facts = summary(manifest)
    model.doc_string = "; ".join(f"{title}: {text}" for title, text in facts.items())
    facts |= {"interface": str(manifest.interface), "certificate": "in posenc.json"}
    model.metadata_props.update({f"posenc.{title}": text for title, text in sorted(facts.items())})
    doc_strings = meanings_of(manifest)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.doc_string = doc_strings.get(str(value.name))
