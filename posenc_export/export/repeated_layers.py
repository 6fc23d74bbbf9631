"""Trace two layers of each kind; further layers get copies of the nodes of the second.

The first layer of a kind also holds values that layers share, such as sizes; nodes of the second
one read them, and so do the copies. The layers of a module that is read are its parts that are
alike (reading/parts.py).
"""

import copy
import re
from collections import Counter
from contextlib import ExitStack
from typing import Any, Dict, List, Optional, Sequence, Tuple

import onnx_ir as ir
import torch
from torch import Tensor
from torch.fx import GraphModule

from posenc_export.export.describe import Model
from posenc_export.export.graph_values import input_names, output_names
from posenc_export.export.read_module import OF_MODULE, ReadModule
from posenc_export.models.stack import Stack
from posenc_export.ops.graph import DOMAIN, Passed
from posenc_export.reading.layer_contents import contents_of, tensors_of
from posenc_export.reading.parts import templates_of
from posenc_export.reading.script import with_source
from posenc_export.runtime.artefact.manifest import Manifest

STATE = re.compile(r"(?:past_key_values|present)\.(\d+)\.")  # begins the name of a layer's state
WHOLE = "model."  # begins the name of a weight in a calling convention
LAYER = f"{WHOLE}layers."  # of a layer
FEWEST = 2  # layers that tracing leaves out, or else it takes all


class RepeatedLayers:
    """The traced part of a model, whose graph becomes that of the whole model.

    Args:
        model: the traced part, which has the weights of the whole model.
        templates: of each layer of the whole model, the index of the traced layer that it is, or
            whose nodes it gets.

    Attributes:
        traced: indices of the traced layers, ascending.
    """

    def __init__(self, model: Model, templates: List[int]) -> None:
        self.model, self.templates, self.traced = model, templates, sorted(set(templates))

    @classmethod
    def of(cls, model: Model) -> Optional["RepeatedLayers"]:
        """Return the traced part of a model, or None if all of its layers are to be traced."""
        if isinstance(model, ReadModule):
            return None if model.repeated is None else _of_module(model)
        if not isinstance(model, Stack):
            return None
        parts = contents_of([*model.layers])
        templates = templates_of([*zip(model.config.kinds, model.mask_of, parts, strict=True)])
        few = len(templates) - len(set(templates)) < FEWEST
        return None if few else _Layers(model, templates)

    def manifest(self, whole: Manifest) -> Manifest:
        """Return the manifest of the traced part; states keep their names."""
        untraced = set(range(len(self.templates))) - set(self.traced)
        gone = {name for layer in untraced for name in self.states(input_names(whole), layer)}
        states = [state for state in whole.states if state.past not in gone]
        encoder = [value for value in whole.encoder if value.name not in gone]
        return whole.replace(states=states, encoder=encoder)

    def states(self, names: Sequence[str], layer: int) -> List[str]:
        """Return the inputs, or outputs, of a graph that are states of a layer, in order."""
        raise NotImplementedError

    def weights(self, layer: int) -> Dict[str, Tuple[str, Tensor]]:
        """Return the weights of a layer alone, with their names, by those of its template."""
        raise NotImplementedError

    def marking(self) -> ExitStack:
        """Return a context in which each traced layer marks its outputs with Passed."""
        return ExitStack()

    def rename(self, graph: ir.Graph) -> None:
        """Give the weights of traced layers the names that they have in the whole model."""

    def complete(self, graph: ir.Graph, manifest: Manifest) -> None:
        """Turn the traced graph into that of the whole model, whose manifest is given."""
        self.rename(graph)
        _Completion(self, graph, manifest).run()


class _Layers(RepeatedLayers):
    """Layers of a Stack."""

    def __init__(self, whole: Stack, templates: List[int]) -> None:
        super().__init__(_with_layers(whole, sorted(set(templates))), templates)
        self.layers = [dict(tensors_of(layer)) for layer in whole.layers]
        owners = (set(map(id, held.values())) for held in self.layers)
        self.owners = Counter(tensor for held in owners for tensor in held)

    def states(self, names: Sequence[str], layer: int) -> List[str]:
        return [name for name in names if (found := STATE.match(name)) and int(found[1]) == layer]

    def weights(self, layer: int) -> Dict[str, Tuple[str, Tensor]]:
        start, of = f"{LAYER}{layer}.", f"{LAYER}{self.templates[layer]}."
        return {
            f"{of}{name}": (f"{start}{name}", tensor)
            for name, tensor in self.layers[layer].items()
            if self.owners[id(tensor)] == 1
        }

    def marking(self) -> ExitStack:
        hooks = ExitStack()
        assert isinstance(self.model, Stack)
        for layer in self.model.layers:
            hooks.callback(layer.register_forward_hook(_mark).remove)
        return hooks

    def rename(self, graph: ir.Graph) -> None:
        named: List[Tuple[int, str, ir.Value]] = []
        for name, value in graph.initializers.items():
            if name.startswith(LAYER):
                index, _, within = name.removeprefix(LAYER).partition(".")
                named.append((int(index), within, value))
        # The last layer first, since indices only grow.
        for place, within, value in sorted(named, key=lambda weight: -weight[0]):
            value.name = f"{LAYER}{self.traced[place]}.{within}"


class _Parts(RepeatedLayers):
    """Parts of a module that is read."""

    def __init__(self, whole: ReadModule) -> None:
        assert whole.repeated is not None
        repeated = self.repeated = whole.repeated
        short = copy.copy(whole)
        calls = with_source(GraphModule(whole.calls, whole.in_own_dtype(repeated.graph)))
        short._modules = {**whole._modules, "calls": calls}
        # The last part is what follows all layers.
        super().__init__(short, repeated.templates[:-1])
        held = dict(whole.calls.state_dict(keep_vars=True))
        owners = Counter(name for names in repeated.weights for name in set(names.values()))
        self.of_parts = [
            {name: (own, held[own]) for name, own in names.items() if owners[own] == 1}
            for names in repeated.weights
        ]

    def states(self, names: Sequence[str], layer: int) -> List[str]:
        caches = [name for name in names if STATE.match(name)]
        return [caches[index] for index in self.repeated.states[layer]]

    def weights(self, layer: int) -> Dict[str, Tuple[str, Tensor]]:
        start = f"{WHOLE}{OF_MODULE}"
        return {
            f"{start}{name}": (f"{start}{own}", tensor)
            for name, (own, tensor) in self.of_parts[layer].items()
        }


def _of_module(module: ReadModule) -> Optional[_Parts]:
    """Return the traced parts of a module, or None if its weights are no longer alike."""
    parts, held = _Parts(module), module.calls.state_dict()
    for weights in parts.of_parts:
        for name, (_, tensor) in weights.items():
            if (tensor.dtype, tensor.shape) != (held[name].dtype, held[name].shape):
                return None
    return parts


class _Completion:
    """The graph of a traced part while copies of layers are added to it.

    Attributes:
        parts: nodes of each traced layer, the last of which is its mark.
        entries: hidden states that each traced layer reads; None for the first.
        inputs, outputs: values of the graph by the names of the manifest.
    """

    def __init__(self, repeated: RepeatedLayers, graph: ir.Graph, manifest: Manifest) -> None:
        self.repeated, self.graph, self.manifest = repeated, graph, manifest
        self.traced = repeated.traced
        part = repeated.manifest(manifest)
        self.inputs = dict(zip(input_names(part), graph.inputs, strict=True))
        self.outputs = dict(zip(output_names(part), graph.outputs, strict=True))
        self.parts = self._parts()
        ends = [nodes[-1].outputs[0] for nodes in self.parts[:-1]]
        self.entries: List[Optional[ir.Value]] = [None, *ends]

    def run(self) -> None:
        """Add the layers that were not traced, in order, and remove the marks."""
        mark, traced_last = self.parts[0][-1], self.parts[-1][-1].outputs[0]
        readers = list(traced_last.uses())
        for layer, template in enumerate(self.repeated.templates):
            if layer == template:
                mark = self._behind(self.traced.index(layer), mark)
            else:
                mark = self._copied(template, layer, mark)
        for node, index in readers:
            node.replace_input_with(index, mark.outputs[0])
        last = mark.inputs[0]
        assert last is not None
        self.outputs = {
            name: last if value is traced_last else value for name, value in self.outputs.items()
        }  # an encoder without a final norm
        for node in [node for node in self.graph if _is_mark(node)]:
            value = node.inputs[0]
            assert value is not None
            node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
            self.graph.remove(node, safe=True)
        for values, ordered in (
            (self.graph.inputs, [self.inputs[name] for name in input_names(self.manifest)]),
            (self.graph.outputs, [self.outputs[name] for name in output_names(self.manifest)]),
        ):
            values.clear()
            values.extend(ordered)

    def _parts(self) -> List[List[ir.Node]]:
        """Return the nodes of each traced layer, which depend on it and on no later layer. The
        first one, which is never copied, has those that depend on none, too.
        """
        tags: Dict[ir.Value, int] = {}
        for place, layer in enumerate(self.traced):
            names = self.repeated.states(input_names(self.manifest), layer)
            tags |= {self.inputs[name]: place for name in names}
            weights = self.repeated.weights(layer).keys() & self.graph.initializers.keys()
            tags |= {self.graph.initializers[name]: place for name in weights}
        parts: List[List[ir.Node]] = [[] for _ in range(len(self.traced) + 1)]  # last: behind all
        for node in self.graph:
            if _counts_rows(node):  # of the state of any layer
                node.replace_input_with(0, self.graph.inputs[0])
            tag = max((tags.get(value, 0) for value in node.inputs if value), default=0)
            parts[tag].append(node)
            tags |= dict.fromkeys(node.outputs, tag + _is_mark(node))
        return [sorted(part, key=_is_mark) for part in parts[:-1]]

    def _behind(self, index: int, mark: ir.Node) -> ir.Node:
        """Let a traced layer read the hidden states of the layer before it, and return its mark."""
        entry = self.entries[index]
        if entry is not None and entry is not mark.outputs[0]:
            for node in self.parts[index]:
                for at, value in enumerate(node.inputs):
                    if value is entry:
                        node.replace_input_with(at, mark.outputs[0])
            self.entries[index] = mark.outputs[0]
        return self.parts[index][-1]

    def _copied(self, template: int, layer: int, mark: ir.Node) -> ir.Node:
        """Copy the nodes of the template of a layer behind a mark; return the mark of the copy."""
        index, weights = self.traced.index(template), self.repeated.weights(layer)
        entry = self.entries[index]
        assert entry is not None
        of: Dict[ir.Value, ir.Value] = {entry: mark.outputs[0], **self._states(template, layer)}
        for node in self.parts[index]:
            inputs = [self._input(value, of, weights) for value in node.inputs]
            copied = ir.node(
                node.op_type,
                inputs,
                node.attributes,
                domain=node.domain,
                num_outputs=len(node.outputs),
            )
            for old, new in zip(node.outputs, copied.outputs, strict=True):
                new.name = f"{old.name}.of_layer_{layer}"
                new.shape = old.shape and old.shape.copy()
                new.type = old.type
                of[old] = new
            self.graph.insert_after(mark, copied)
            mark = copied
        names = output_names(self.manifest)
        states = (self.repeated.states(names, one) for one in (template, layer))
        self.outputs |= {new: of[self.outputs[name]] for name, new in zip(*states, strict=True)}
        return mark

    def _states(self, template: int, layer: int) -> Dict[ir.Value, ir.Value]:
        """Add the states of a layer to the inputs, and return them by those of its template."""
        names, found = input_names(self.manifest), dict[ir.Value, ir.Value]()
        states = (self.repeated.states(names, one) for one in (template, layer))
        for name, new in zip(*states, strict=True):
            value = self.inputs[name]
            shape = value.shape and value.shape.copy()
            self.inputs[new] = found[value] = ir.Value(name=new, shape=shape, type=value.type)
        return found

    def _input(
        self,
        value: Optional[ir.Value],
        of: Dict[ir.Value, ir.Value],
        weights: Dict[str, Tuple[str, Tensor]],
    ) -> Optional[ir.Value]:
        """Return what the copy of a node for a layer reads in place of a value."""
        if value is None or value in of or str(value.name) not in weights:
            return value if value is None else of.get(value, value)
        name, weight = weights[str(value.name)]
        if name not in self.graph.initializers:
            tensor = ir.tensor(weight.detach(), name=name)
            initializer = ir.Value(
                name=name, shape=value.shape, type=value.type, const_value=tensor
            )
            self.graph.register_initializer(initializer)
        return self.graph.initializers[name]


def _counts_rows(node: ir.Node) -> bool:
    """Return whether a node is the size of the first axis of an input."""
    if node.op_type != "Shape" or not node.inputs[0] or not node.inputs[0].is_graph_input():
        return False
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    return end is not None and end.as_int() == 1 and (start is None or start.as_int() == 0)


def _with_layers(model: Stack, chosen: Sequence[int]) -> Stack:
    """Return a model with some layers of another one, which keep their weights."""
    shallow = copy.copy(model)
    layers = torch.nn.ModuleList(model.layers[index] for index in chosen)
    shallow._modules = {**model._modules, "layers": layers}
    shallow.mask_of = [model.mask_of[index] for index in chosen]
    shallow.layer_states = [model.layer_states[index] for index in chosen]
    shallow.reads_encoder = [model.reads_encoder[index] for index in chosen]
    shallow.kept_states = shallow.embed_states + sum(shallow.layer_states)
    return shallow


def _mark(_: torch.nn.Module, __: Any, outputs: Any) -> Any:
    x, present = outputs
    return Passed.emit(x, x.shape, x), present


def _is_mark(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == Passed.__name__
