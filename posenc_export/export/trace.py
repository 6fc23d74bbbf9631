"""A model in one dtype, traced once per calling convention, and the part of its graph that reads
constants alone, before the optimizer folds it.
"""

from typing import Any, Callable, Mapping, Sequence, TypeVar

import numpy as np
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator

from posenc_export.export.describe import trace_inputs
from posenc_export.export.onnx_program import onnx_program
from posenc_export.export.quantization.grid import OnGrid
from posenc_export.export.read_module import Model, ReadModule
from posenc_export.export.signatures import wrap
from posenc_export.ops import graph as semantic
from posenc_export.ops.graph import semantic_graph
from posenc_export.ops.layers import BEGIN, END, NAME
from posenc_export.reading.layers_once import LayersOnce
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.progress import Progress, Step, silent

T = TypeVar("T")
OPSET = 23  # of the trace; its operators have the same meaning in later opsets


class TracedConstants:
    """The part of a traced graph that reads constants only.

    Args:
        graph: before it is optimized. Later changes of the graph have no effect here.

    Attributes:
        read: names of the initializers that a node reads.
        tensors: initializers by name; weights are not copied.
    """

    def __init__(self, graph: ir.Graph) -> None:
        stored = {name: value.const_value for name, value in graph.initializers.items()}
        self.tensors = {name: tensor for name, tensor in stored.items() if tensor is not None}
        self.read = {name for name in self.tensors if list(graph.initializers[name].uses())}
        known = {value for value in graph.initializers.values() if value.name in self.tensors}
        computed: list[ir.Value] = []
        for node in graph:
            inputs = [value for value in node.inputs if value is not None]
            if node.domain == "" and known.issuperset(inputs) and not _has_body(node):
                known.update(node.outputs)
                computed += node.outputs
        self._names = {value.name for value in computed}
        self._graph = ir.convenience.extract(graph, [], computed) if computed else None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def _part(self, name: str) -> ir.Graph:
        """Return the nodes and constants that compute a value."""
        assert self._graph is not None
        return ir.convenience.extract(self._graph, [], [name])

    def computed(self, name: str) -> np.ndarray:
        """Return a value, computed by the reference evaluator, as the optimizer does."""
        model = ir.to_proto(ir.Model(self._part(name), ir_version=10))
        values: Any = ReferenceEvaluator(model).run(None, {})
        return np.asarray(values[0])

    def sources(self, name: str) -> set[str]:
        """Return the names of initializers that a value is computed from."""
        return set(self._part(name).initializers)


def _has_body(node: ir.Node) -> bool:
    bodies = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in bodies for attribute in node.attributes.values())


class Source:
    """A model in one dtype with its semantic graphs.

    Args:
        model: in eval mode; its weights must not be modified afterwards.
        cache_scales: scales of cached keys and values by state (calibration.cache_scales); None if
            their format has none.
        on_grid: grids and codes of rounded weights by name of the parameter (rounding.rounded);
            None if none is rounded.
        rounded: the fields of the manifest that say what is rounded.
        say: reports progress of tracing and writing.
        exact: float32 model that gives the expected outputs of the artefact; None for `model`.
    """

    def __init__(
        self,
        model: Model,
        cache_scales: Mapping[str, np.ndarray] | None = None,
        on_grid: Mapping[str, OnGrid] | None = None,
        rounded: Mapping[str, Any] | None = None,
        say: Progress = silent,
        exact: Model | None = None,
    ) -> None:
        self.model, self.rounded, self.say = model, rounded or {}, say
        self.exact = model if exact is None else exact
        self.cache_scales, self.on_grid = cache_scales or {}, on_grid or {}
        self._computed: dict[tuple[Any, ...], Any] = {}

    def once(self, key: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return the result of `compute` from the first call with this key, which targets share."""
        if key not in self._computed:
            self._computed[key] = compute()
        return self._computed[key]

    def semantic(self, manifest: Manifest) -> ir.Model:
        """Return a copy of the graph with semantic nodes for the manifest's calling convention.
        Rounded weights are read through nodes OnGrid. ValueError: the module mutates buffers or
        inputs.
        """
        return self._traced(manifest)[0].clone()

    def traced(self, manifest: Manifest) -> TracedConstants:
        """Return the part that reads constants of the graph for the manifest's signature."""
        return self._traced(manifest)[1]

    def _traced(self, manifest: Manifest) -> tuple[ir.Model, TracedConstants]:
        return self.once(("graph", manifest.signature), lambda: _traced(self, manifest))


def _traced(source: Source, manifest: Manifest) -> tuple[ir.Model, TracedConstants]:
    """Trace a source. Return the optimized graph, and of the graph before it was optimized the part
    that reads constants only.
    """
    source.say(Step(f"{manifest.target}: tracing"))
    model = source.model
    traced = model.traced_once() if isinstance(model, ReadModule) else model
    module = wrap(traced, manifest.signature)
    arguments, shapes = trace_inputs(manifest)
    with semantic_graph(), LayersOnce(module).marked(module):
        program = onnx_program(module, arguments, shapes, OPSET)
    graph = program.model.graph
    _complete(graph)
    constants = TracedConstants(graph)
    _read_through_nodes(graph, module, model, source.on_grid)
    turned = _transposed_weights(graph)
    program.optimize()
    for value, name in turned.items():
        if value in graph.initializers:  # the optimizer folded the transpose
            graph.initializers[value].name = name
    return program.model, constants


def _complete(graph: ir.Graph) -> None:
    """Replace the marks of layers that were not traced by copies of the first of their kinds. Nodes
    that read the same values in both layers, and sizes, are not copied.
    """
    begun: dict[str, ir.Node] = {}
    inside: dict[str, list[ir.Node]] = {}
    ended: dict[str, ir.Node] = {}
    for mark in _marks(graph):
        part, name = (mark.attributes[key].as_string() for key in ("part", "name"))
        if part == BEGIN:
            begun[name] = mark
        elif part == END:  # layers within it are complete
            nodes = list(graph)
            inside[name] = nodes[nodes.index(begun[name]) + 1 : nodes.index(mark)]
            ended[name] = mark
        else:
            of = _exchanged(begun[name], mark)
            for node in inside[name]:
                if node.op_type != "Shape" and any(value in of for value in node.inputs):
                    graph.insert_before(mark, _copied(node, of, f"{node.name}.{mark.name}"))
            _replace(mark, [of.get(value, value) for value in ended[name].inputs])
    for mark in _marks(graph):
        _replace(mark, mark.inputs)


def _marks(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.domain == semantic.DOMAIN and node.op_type == NAME]


def _exchanged(first: ir.Node, mark: ir.Node) -> dict[Any, Any]:
    """Return the values that a layer reads, by those that the first of its kind reads instead."""
    pairs = enumerate(zip(first.inputs, mark.inputs, strict=True))
    arguments = dict(enumerate(first.outputs))
    return {arguments.get(i, read): own for i, (read, own) in pairs if read is not own}


def _copied(node: ir.Node, of: dict[Any, Any], name: str) -> ir.Node:
    """Return a copy of a node with inputs exchanged by `of`, and add its outputs to `of`."""
    copied = ir.node(
        node.op_type,
        [of.get(value, value) for value in node.inputs],
        node.attributes,
        domain=node.domain,
        num_outputs=len(node.outputs),
        name=name,
    )
    for old, new in zip(node.outputs, copied.outputs, strict=True):
        new.name, new.type = f"{old.name}.{name}", old.type
        new.shape = old.shape and old.shape.copy()
        of[old] = new
    return copied


def _replace(mark: ir.Node, values: Sequence[Any]) -> None:
    """Remove a mark. Readers of its outputs read `values`, which may end with weights."""
    for output, value in zip(mark.outputs, values, strict=False):
        output.replace_all_uses_with(value, replace_graph_outputs=True)
    mark.graph.remove(mark, safe=True)  # type: ignore[union-attr]


def _transposed_weights(graph: ir.Graph) -> dict[str, str]:
    """Return names for weights that the optimizer may fold transposed: "PARAMETER.T", by value."""
    names = {}
    for name, weight in graph.initializers.items():
        read = [node.outputs[0] for node, _ in weight.uses()]
        turned = [value for value in read if transposed(value) is weight]
        if weight.shape is not None and len(weight.shape) == 2 and len(turned) == 1:
            names[str(turned[0].name)] = f"{name}.T"
    return names


def transposed(value: ir.Value | None) -> ir.Value | None:
    """Return the matrix whose transpose a value is, or None."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Transpose":
        return None
    order = node.attributes.get("perm")
    return node.inputs[0] if order is None or list(order.as_ints()) == [1, 0] else None


def _read_through_nodes(
    graph: ir.Graph, module: torch.nn.Module, model: Model, on_grid: Mapping[str, OnGrid]
) -> None:
    """Put a semantic node OnGrid, which returns its input, between each rounded weight and the
    nodes that read it.

    The node keeps the name of the parameter, which would be lost if the optimizer folded the
    weight. Passes of export/targets/builder.py replace it.

    Args:
        module: has the names of the initializers; a tied parameter has several.
        model: has the names of the rounded parameters.
    """
    known = {id(parameter): name for name, parameter in model.named_parameters() if name in on_grid}
    for initializer, parameter in module.named_parameters(remove_duplicate=False):
        weight = graph.initializers.get(initializer)
        if weight is not None and id(parameter) in known:
            node = ir.node(
                "OnGrid", [weight], {"name": known[id(parameter)]}, domain=semantic.DOMAIN
            )
            made = node.outputs[0]
            made.name, made.shape, made.type = f"{initializer}.on_grid", weight.shape, weight.type
            weight.replace_all_uses_with(made)
            node.replace_input_with(0, weight)
            graph.insert_before(graph[0], node)
