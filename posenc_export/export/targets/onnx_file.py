"""Write model.onnx and model.onnx.data: lower a semantic graph, strip, describe, save."""

import collections
import functools
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence

import msgspec
import onnx_ir as ir
from onnx_ir.passes import common

from posenc_export.encodings.shared.tables import levels_of
from posenc_export.export.signatures import wrap
from posenc_export.export.targets import (
    external_data,
    graph_ends,
    small_caches,
    standard,
    two_levels,
)
from posenc_export.export.targets.builder import Builder
from posenc_export.export.targets.rewriter import Fusion, Table, finish, fuse, lower, replace_nodes
from posenc_export.export.trace import OPSET, Source
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.graph_inputs import meanings_of
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import Weights
from posenc_export.runtime.artefact.schema import INTERFACE
from posenc_export.runtime.artefact.summary import summary
from posenc_export.shared.progress import Step, Steps
from posenc_export.shared.refusal import refusal
from posenc_export.shared.version import VERSION

FILE_NAME = "model.onnx"
IR_VERSION = 10  # ONNX Runtime 1.31 loads up to 13; 10 is what older releases load too
PRODUCER = "posenc_export"
SINCE = {"TensorScatter": 24}  # opset of operators that were added after OPSET


class Lowerings(NamedTuple):
    """How a target lowers a semantic graph."""

    tables: Sequence[Table]  # lowering tables, each applied to the whole graph before the next
    # Nodes for quantized weights; takes the dtype of activations in products.
    few_bits: Callable[[str], Any]
    # Fusions of standard nodes, applied to the lowered graph.
    fusions: Mapping[str, Fusion] = MappingProxyType({})
    # Whether kernels of a device run the graph, for which the caller counts slots: Range and Slice
    # read sizes on the host, to which one that is computed on the device would be copied. Large
    # tables of rotations are then stored whole.
    on_device: bool = False


def write_onnx(source: Source, manifest: Manifest, folder: Path, lowerings: Lowerings) -> Manifest:
    """Write folder/model.onnx and its external data (targets.Write)."""
    model = source.semantic(manifest)
    source.say(Step(f"{manifest.target}: lowering"))
    graph_ends.name(model.graph, manifest)
    graph_ends.count_past(model.graph, manifest)
    if manifest.passed_dtype != manifest.dtype:
        graph_ends.cast(model.graph, manifest)
    module = wrap(source.model, manifest.signature)
    levels, sizes = {} if lowerings.on_device else levels_of(module), manifest.max_positions
    op = Builder(model, manifest.dtype, sizes, source.on_grid, levels, lowerings.on_device)
    spelled = {"Where": standard.choice_of_booleans, "RMSNormalization": standard.norm_of_one_type}
    replace_nodes(op, {**two_levels.GATHERS, **spelled})
    for table in lowerings.tables:
        lower(op, table)
    weights = _in_few_bits(op, manifest, lowerings.few_bits)
    finish(op)
    if manifest.cache:
        small_caches.store(op, manifest, source.cache_scales)
    fuse(op, lowerings.fusions)
    inputs, states = graph_ends.without_unread(op, manifest)
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
    moved = external_data.move_out(model.graph, folder, steps)
    content = ir.to_proto(model).SerializeToString(deterministic=True)
    written = {FILE_NAME: files.write(folder / FILE_NAME, content)}
    if moved is not None:
        written[external_data.WEIGHTS] = moved
    return manifest.replace(files=written)


def _in_few_bits(
    op: Builder, manifest: Manifest, few_bits: Callable[[str], Any]
) -> Optional[Weights]:
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
    domains: Dict[str, int] = {"": max(OPSET, *opsets)}
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
