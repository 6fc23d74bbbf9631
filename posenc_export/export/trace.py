"""A model in one dtype, traced once per calling convention."""

import contextlib
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, TypeVar

import numpy as np
import onnx_ir as ir
import torch

from posenc_export.export.describe import FewBits, Model
from posenc_export.export.example_inputs import trace_inputs
from posenc_export.export.onnx_program import onnx_program
from posenc_export.export.quantization.grid import OnGrid
from posenc_export.export.repeated_layers import RepeatedLayers
from posenc_export.export.signatures import wrap
from posenc_export.export.traced_constants import TracedConstants
from posenc_export.export.weight_file import page_out
from posenc_export.ops import graph as semantic
from posenc_export.ops.graph import semantic_graph
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.progress import Progress, Step, silent

T = TypeVar("T")
OPSET = 23  # of the trace; its operators have the same meaning in later opsets


class Source:
    """A model in one dtype with its semantic graphs.

    Args:
        model: in eval mode; its weights must not be modified afterwards.
        cache_scales: scales of cached keys and values by state (calibration.cache_scales); None if
            their format has none.
        on_grid: grids and codes of rounded weights by name of the parameter (formats.rounded); None
            if none is rounded.
        few_bits: what is rounded, for the manifest.
        say: reports progress of tracing and writing.
        exact: float32 model whose outputs are expected of the artefact; None for `model`.
    """

    def __init__(
        self,
        model: Model,
        cache_scales: Optional[Mapping[str, np.ndarray]] = None,
        on_grid: Optional[Mapping[str, OnGrid]] = None,
        few_bits: FewBits = FewBits(),
        say: Progress = silent,
        exact: Optional[Model] = None,
    ) -> None:
        self.model, self.few_bits, self.say = model, few_bits, say
        self.exact = model if exact is None else exact
        self.cache_scales, self.on_grid = cache_scales or {}, on_grid or {}
        self._graphs: Dict[str, Tuple[ir.Model, TracedConstants]] = {}
        self._computed: Dict[Tuple[Any, ...], Any] = {}

    def once(self, key: Tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return what `compute` returned for this key first, which targets share."""
        if key not in self._computed:
            self._computed[key] = compute()
        return self._computed[key]

    def release(self) -> None:
        """Release memory of weights and codes that are mapped from a file, until used again."""
        codes = [
            numbers
            for _, one in self.on_grid.values()
            for numbers in (one.codes, one.scales, one.offsets)
            if numbers is not None
        ]
        page_out([*self.model.parameters(), *codes])

    def semantic(self, manifest: Manifest) -> ir.Model:
        """Return a copy of the graph with semantic nodes for the manifest's calling convention.
        Rounded weights are read through nodes OnGrid. ValueError: the module mutates buffers or
        inputs.
        """
        return self._traced(manifest)[0].clone()

    def traced(self, manifest: Manifest) -> TracedConstants:
        """Return what the graph for the manifest's calling convention computes from constants."""
        return self._traced(manifest)[1]

    def _traced(self, manifest: Manifest) -> Tuple[ir.Model, TracedConstants]:
        if manifest.signature not in self._graphs:
            self.say(Step(f"{manifest.target}: tracing"))
            self._graphs[manifest.signature] = _traced(self.model, manifest, self.on_grid)
        return self._graphs[manifest.signature]


def _traced(
    model: Model, manifest: Manifest, on_grid: Mapping[str, OnGrid]
) -> Tuple[ir.Model, TracedConstants]:
    """Return the optimized graph, and what was computed from constants before."""
    part, whole = RepeatedLayers.of(model), wrap(model, manifest.signature)
    module, marking = whole, contextlib.ExitStack()
    if part is not None:
        module, marking = wrap(part.model, manifest.signature), part.marking()
    arguments, shapes = trace_inputs(manifest if part is None else part.manifest(manifest))
    with marking, semantic_graph():
        program = onnx_program(module, arguments, shapes, OPSET)
    graph = program.model.graph
    if part is not None:
        part.complete(graph, manifest)
    constants = TracedConstants(graph)
    _read_through_nodes(graph, _initializers(whole, model, on_grid))
    turned = _transposed_weights(graph)
    program.optimize()
    for value, name in turned.items():
        if value in graph.initializers:  # the optimizer folded the transpose
            graph.initializers[value].name = name
    return program.model, constants


def _transposed_weights(graph: ir.Graph) -> Dict[str, str]:
    """Return names, parameter and ".T", of weights that may be folded transposed."""
    weights = {
        name: [node for node, _ in weight.uses() if _turns(node)]
        for name, weight in graph.initializers.items()
        if weight.shape is not None and len(weight.shape) == 2
    }
    return {
        str(nodes[0].outputs[0].name): f"{name}.T"
        for name, nodes in weights.items()
        if len(nodes) == 1
    }


def _turns(node: ir.Node) -> bool:
    """Whether a node transposes a matrix; a trace also has some that change no order."""
    if node.op_type != "Transpose":
        return False
    order = node.attributes.get("perm")
    return order is None or list(order.as_ints()) == [1, 0]


def _initializers(
    module: torch.nn.Module, model: Model, on_grid: Mapping[str, OnGrid]
) -> Dict[str, str]:
    """Return parameters of `model` by their names in `module`; a tied one has several."""
    known = {id(parameter): name for name, parameter in model.named_parameters() if name in on_grid}
    return {
        name: known[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if id(parameter) in known
    }


def _read_through_nodes(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Put a semantic node OnGrid, which returns its input, between each rounded weight and the
    nodes that read it.

    It keeps the name of the parameter, which would be lost where the optimizer folds a constant.
    Passes of export/targets/rewriter.py replace it.

    Args:
        names: names of rounded parameters by name of the initializer.
    """
    for initializer, name in names.items():
        if initializer in graph.initializers:
            weight = graph.initializers[initializer]
            node = ir.node("OnGrid", [weight], {"name": name}, domain=semantic.DOMAIN)
            made = node.outputs[0]
            made.name, made.shape, made.type = f"{initializer}.on_grid", weight.shape, weight.type
            weight.replace_all_uses_with(made)
            node.replace_input_with(0, weight)
            graph.insert_before(graph[0], node)
