"""Trace two layers of each kind; further layers get copies of the nodes of the second.

The first layer of a kind also holds values that layers share, such as sizes; nodes of the second
one read them, and so do the copies.
"""

import copy
import re
from contextlib import ExitStack
from typing import Any, Dict, List, Optional, Sequence, Tuple

import onnx_ir as ir
import torch

from posenc_export.export.describe import Model
from posenc_export.export.graph_values import input_names, output_names
from posenc_export.export.layer_contents import kinds_of, tensors_of
from posenc_export.models.stack import Stack
from posenc_export.ops.graph import DOMAIN, Passed
from posenc_export.runtime.artefact.manifest import Manifest

STATE = re.compile(r"past_key_values\.(\d+)\.")  # begins the name of a state of a layer
LAYER = "model.layers."  # begins the name of a weight of a layer in a calling convention
TRACED = 2  # layers of each kind
FEWEST = 2  # layers that tracing leaves out, or else it takes all


class RepeatedLayers:
    """The traced part of a model, whose graph becomes that of the whole model.

    Args:
        whole: the whole model.
        traced: indices of the layers that are traced, ascending.
        kinds: number of the kind of each layer of the whole model.

    Attributes:
        model: the traced part, which has the modules of the whole model.
    """

    def __init__(self, whole: Stack, traced: Sequence[int], kinds: Sequence[int]) -> None:
        self.whole, self.traced, self.kinds = whole, list(traced), kinds
        self.model = _with_layers(whole, self.traced)

    @classmethod
    def of(cls, model: Model) -> Optional["RepeatedLayers"]:
        """Return the traced part of a model, or None if all of its layers are to be traced."""
        if not isinstance(model, Stack):
            return None
        kinds = kinds_of(model)
        traced = [index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < TRACED]
        return cls(model, traced, kinds) if len(kinds) - len(traced) >= FEWEST else None

    def manifest(self, whole: Manifest) -> Manifest:
        """Return the manifest of the traced part; states keep their names."""
        kept = {*self.traced, None}
        states = [state for state in whole.states if _layer_of(state.past) in kept]
        encoder = [value for value in whole.encoder if _layer_of(value.name) in kept]
        return whole.replace(states=states, encoder=encoder)

    def marking(self) -> ExitStack:
        """Return a context in which each traced layer marks its outputs with Passed."""
        hooks = ExitStack()
        for layer in self.model.layers:
            hooks.callback(layer.register_forward_hook(_mark).remove)
        return hooks

    def complete(self, graph: ir.Graph, manifest: Manifest) -> None:
        """Turn the traced graph into that of the whole model, whose manifest is given."""
        _Completion(self, graph, manifest).run()


class _Completion:
    """The graph of a traced part while copies of layers are added to it.

    Attributes:
        parts: nodes of each traced layer, the last of which is its mark.
        entries: hidden states that each traced layer reads; None for the first.
        inputs, outputs: values of the graph by the names of the manifest.
    """

    def __init__(self, repeated: RepeatedLayers, graph: ir.Graph, manifest: Manifest) -> None:
        self.graph, self.manifest = graph, manifest
        self.traced, self.kinds = repeated.traced, repeated.kinds
        self.layers = [dict(tensors_of(layer)) for layer in repeated.whole.layers]
        part = repeated.manifest(manifest)
        self.inputs = dict(zip(input_names(part), graph.inputs, strict=True))
        self.outputs = dict(zip(output_names(part), graph.outputs, strict=True))
        self._name_weights()
        self.parts = self._parts()
        ends = [nodes[-1].outputs[0] for nodes in self.parts[:-1]]
        self.entries: List[Optional[ir.Value]] = [None, *ends]

    def run(self) -> None:
        """Add the layers that were not traced, in order, and remove the marks."""
        mark, traced_last = self.parts[0][-1], self.parts[-1][-1].outputs[0]
        readers = list(traced_last.uses())
        for layer, kind in enumerate(self.kinds):
            if layer in self.traced:
                mark = self._behind(self.traced.index(layer), mark)
            else:
                alike = [n for n, other in enumerate(self.traced) if self.kinds[other] == kind]
                mark = self._copied(alike[-1], layer, mark)
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

    def _name_weights(self) -> None:
        """Give the weights of traced layers the names that they have in the whole model."""
        named: List[Tuple[int, str, ir.Value]] = []
        for name, value in self.graph.initializers.items():
            if name.startswith(LAYER):
                index, _, within = name.removeprefix(LAYER).partition(".")
                named.append((int(index), within, value))
        # The last layer first, since indices only grow.
        for place, within, value in sorted(named, key=lambda weight: -weight[0]):
            value.name = f"{LAYER}{self.traced[place]}.{within}"

    def _parts(self) -> List[List[ir.Node]]:
        """Return the nodes of each traced layer, which depend on it and on no later layer."""
        place = {layer: index for index, layer in enumerate(self.traced)}
        layers = {value: _layer_of(name) for name, value in self.inputs.items()}
        tags = {value: place[layer] for value, layer in layers.items() if layer is not None}
        for name, value in self.graph.initializers.items():
            if (weight := self._of_layer(name)) is not None:
                tags[value] = place[weight[0]]
        parts: List[List[ir.Node]] = [[] for _ in range(len(self.traced) + 1)]  # last: behind all
        for node in self.graph:
            tag = max((tags[value] for value in node.inputs if value in tags), default=None)
            if tag is not None:
                parts[tag].append(node)
                tags |= dict.fromkeys(node.outputs, tag + _is_mark(node))
        return [sorted(part, key=_is_mark) for part in parts[:-1]]

    def _of_layer(self, name: str) -> Optional[Tuple[int, str]]:
        """Return layer and inner name of a weight of one layer alone; else None."""
        layer, _, within = name.removeprefix(LAYER).partition(".")
        if not name.startswith(LAYER) or int(layer) not in self.traced:
            return None
        tensor = self.layers[int(layer)].get(within)
        if tensor is None:  # a constant, equal in all layers of a kind
            return None
        others = (of for index, of in enumerate(self.layers) if index != int(layer))
        shared = any(tensor is other for of in others for other in of.values())
        return None if shared else (int(layer), within)

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

    def _copied(self, index: int, layer: int, mark: ir.Node) -> ir.Node:
        """Copy the nodes of a traced layer behind a mark; return the mark of the copy."""
        entry, template = self.entries[index], self.traced[index]
        assert entry is not None
        of: Dict[ir.Value, ir.Value] = {entry: mark.outputs[0], **self._states(template, layer)}
        for node in self.parts[index]:
            inputs = [self._input(value, of, layer) for value in node.inputs]
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
        for name, value in list(self.outputs.items()):
            if name.startswith(f"present.{template}."):
                self.outputs[f"present.{layer}.{name.split('.', 2)[2]}"] = of[value]
        return mark

    def _states(self, template: int, layer: int) -> Dict[ir.Value, ir.Value]:
        """Add the states of a layer to the inputs, and return them by those of a traced layer."""
        start, states = f"past_key_values.{template}.", {}
        for name, value in list(self.inputs.items()):
            if name.startswith(start):
                new = f"past_key_values.{layer}.{name.removeprefix(start)}"
                shape = value.shape and value.shape.copy()
                self.inputs[new] = states[value] = ir.Value(name=new, shape=shape, type=value.type)
        return states

    def _input(
        self, value: Optional[ir.Value], of: Dict[ir.Value, ir.Value], layer: int
    ) -> Optional[ir.Value]:
        """Return what the copy of a node for a layer reads in place of a value."""
        if value is None or value in of or not value.is_initializer():
            return value if value is None else of.get(value, value)
        weight = self._of_layer(str(value.name))
        if weight is None:
            return value
        name = f"{LAYER}{layer}.{weight[1]}"
        if name not in self.graph.initializers:
            tensor = ir.tensor(self.layers[layer][weight[1]].detach(), name=name)
            initializer = ir.Value(
                name=name, shape=value.shape, type=value.type, const_value=tensor
            )
            self.graph.register_initializer(initializer)
        return self.graph.initializers[name]


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


def _layer_of(state: str) -> Optional[int]:
    """Return the layer of a state by its name; None for a state of no layer."""
    match = STATE.match(state)
    return None if match is None else int(match[1])
