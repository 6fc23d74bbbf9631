"""Layers that are alike are read once: a short graph has one layer of each kind. The others return
their input there, between edges (ops/layers.py), and copies of the first layer replace them later.
"""

import dataclasses
import operator
import string
from dataclasses import dataclass
from typing import Any, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from posenc_export import ops
from posenc_export.ops.layers import AGAIN, BEGIN, EDGE, END
from posenc_export.reading.calls import Cache, Calls
from posenc_export.reading.graphs import results_of
from posenc_export.reading.refused import Refused
from posenc_export.reading.whole import Capture, OneTensor

FEWEST = 60  # a graph is not shortened by fewer nodes
Names = dict[str, str]  # names of weights, by their names in the first layer of the kind


class Site(NamedTuple):
    """A range of nodes of the whole module: a layer, or the nodes between two layers.

    Attributes:
        segment: index of the same nodes, or of those to copy, in the short graph.
        layer: name of the layer; empty between layers.
        entry: the edge before the layer.
    """

    segment: int
    layer: str = ""
    entry: Any = None


class Layers:
    """The layers of a graph with edges.

    Args:
        graph: the graph.
        copies: by name of a layer that may be left out, the first layer of its kind.

    Attributes:
        segments: nodes up to and including each edge.
        sites: of the whole module, in order.
        kinds: the first layers of kinds that have copies.

    Raises:
        Refused: a layer is called twice.
    """

    def __init__(self, graph: Graph, copies: Mapping[str, str]) -> None:
        self.copies, self.segments, self.sites = copies, [list[Node]()], [Site(0)]
        inside: dict[str, int] = {}
        for node in [node for node in graph.nodes if node.op == "call_function"]:
            self.segments[-1].append(node)
            if node.target is not EDGE:
                continue
            _, part, name = node.args
            begins, index = part == BEGIN, len(self.segments)
            if begins and inside.setdefault(name, index) != index:
                raise Refused(f"calls the layer {name} twice")
            if part == AGAIN:
                self.sites.append(Site(inside[copies[name]], name, node))
            self.sites.append(Site(index, name, node) if begins else Site(index))
            self.segments.append([])
        self.kinds = {copies[site.layer] for site in self.sites if site.layer in copies}

    def left_out(self) -> int:
        """Return the number of nodes in the layers that were left out."""
        return sum(len(self.segments[s.segment]) for s in self.sites if s.layer in self.copies)

    def states(self, past: Sequence[Node]) -> list[list[Node]]:
        """Return the states that each segment reads."""
        return [[s for s in past if not s.users.keys().isdisjoint(own)] for own in self.segments]

    def weights(self, names: Mapping[Node, str]) -> list[Names]:
        """Return the names of the weights of each site. names: of weights, by node."""
        found = []
        for site in self.sites:
            first = self.copies.get(site.layer, site.layer)
            read = [n for node in self.segments[site.segment] for n in node.all_input_nodes]
            own = dict.fromkeys(names[n] for n in read if n in names)
            found.append({name: _of_layer(name, first, site.layer) for name in own if first})
        return found


def _of_layer(name: str, first: str, layer: str) -> str:
    """Return the name in `layer` of a weight that is named `name` in the layer `first`."""
    return layer + name[len(first) :] if name.startswith(f"{first}.") else name


class _Whole:
    """A graph of all layers.

    Args:
        short: graph with edges.
        copies: as in Layers.
        names: of the nodes that are weights.
        weights, states: of each site, the names of its weights, and the places of its states.
        marks: whether each copy of a layer is one mark (ops/layers.py).

    Attributes:
        graph: the result.
        known: its nodes by those of the short graph.
        held: its weights by name.
    """

    def __init__(
        self,
        short: Graph,
        copies: Mapping[str, str],
        names: Mapping[Node, str],
        weights: Sequence[Names],
        states: Sequence[Sequence[int]],
        marks: bool = False,
    ) -> None:
        self.layers, self.marks = Layers(short, copies), marks
        self.weights = {name: node for node, name in names.items()}
        self.graph, self.known = Graph(), dict[Node, Node]()
        past, (y, *new) = _states(short), results_of(short)
        for node in [n for n in short.nodes if n.op in ("placeholder", "get_attr")]:
            if node not in past:
                self.known[node] = self.graph.node_copy(node)
        self.held = {name: self.known[node] for node, name in names.items()}
        self.states = [self.graph.placeholder(f"states_{i}") for i in range(sum(map(len, states)))]
        for state in self.states:
            state.meta = dict(past[0].meta)
        self.present_of, self.present = dict(zip(past, new, strict=True)), dict[int, Node]()
        self.begun: dict[str, Node] = {}  # by name, the edge before the first layer of each kind
        self.results: dict[str, list[Node]] = {}  # the values after such a layer, if it is marked
        self.own = self.layers.states(past)
        for site, named, places in zip(self.layers.sites, weights, states, strict=True):
            if site.layer not in copies:
                self._first(site, named, places)
            elif marks:
                self._mark_again(site, copies[site.layer], named, places)
            else:
                self._again(site, copies[site.layer], named, places)
        output = self.known[y], *map(self.present.__getitem__, range(len(self.states)))
        self.graph.output(output)

    def _first(self, site: Site, named: Names, places: Sequence[int]) -> None:
        """Add the nodes of a site that is no copy, between marks if the layer has copies."""
        values, own = [self.states[i] for i in places], self.own[site.segment]
        marked = self.marks and site.layer in self.layers.kinds
        if marked:
            values = [self.known[site.entry.args[0]], *values]
            held = [self.held[name] for name in named]
            self.known[site.entry], *values = self._mark(BEGIN, site.layer, values + held, values)
        self.known |= zip(own, values, strict=True)
        self.begun[site.layer], nodes = site.entry, self.layers.segments[site.segment]
        for node in nodes:
            if node.target is EDGE:
                self.known[node] = self.known[node.args[0]]  # type: ignore[index]
            else:
                self.known[node] = self.graph.node_copy(node, self.known.__getitem__)
        results = [self.known[self.present_of[state]] for state in own]
        if marked:
            given = [self.known[nodes[-1]], *results]
            made = self.results[site.layer] = self._mark(END, site.layer, given, given)
            self.known[nodes[-1]], *results = made
        self.present |= zip(places, results, strict=True)

    def _again(self, site: Site, first: str, named: Names, places: Sequence[int]) -> None:
        """Add a copy of the first layer of a kind: the nodes that read other values there."""
        own = self.own[site.segment]
        of = {self.begun[first]: self.known[site.entry.args[0]]}
        of |= zip(own, (self.states[i] for i in places), strict=True)
        of |= {self.weights[a]: self._weight(b, self.held[a]) for a, b in named.items() if a != b}
        *nodes, end = self.layers.segments[site.segment]

        def value(node: Node) -> Node:
            return of[node] if node in of else self.known[node]

        for node in nodes:
            if not of.keys().isdisjoint(node.all_input_nodes):
                of[node] = self.graph.node_copy(node, value)
        self.known[site.entry] = value(end.args[0])  # type: ignore[arg-type]
        self.present |= zip(places, (value(self.present_of[s]) for s in own), strict=True)

    def _mark_again(self, site: Site, first: str, named: Names, places: Sequence[int]) -> None:
        """Put a mark in the place of a layer that is left out."""
        held = [self._weight(own, self.held[name]) for name, own in named.items()]
        values = [self.known[site.entry.args[0]], *(self.states[i] for i in places), *held]
        self.known[site.entry], *results = self._mark(AGAIN, first, values, self.results[first])
        self.present |= zip(places, results, strict=True)

    def _mark(self, part: str, name: str, values: list[Node], like: list[Node]) -> list[Node]:
        mark = self.graph.call_function(ops.layer, (part, name, values, like))
        items = [self.graph.call_function(operator.getitem, (mark, i)) for i in range(len(like))]
        for item, value in zip(items, like, strict=True):
            item.meta = dict(value.meta)
        return items

    def _weight(self, name: str, like: Node) -> Node:
        if name not in self.held:
            target = name if like.op == "get_attr" else name.replace(".", "_")
            self.held[name] = self.graph.create_node(like.op, target)
            self.held[name].meta = dict(like.meta)
        return self.held[name]


def _states(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("states_")]


# A captured graph


def whole_of(short: Capture, module: OneTensor) -> Capture:
    """Return the capture of a whole module from that with one layer of each kind. Without copies of
    layers, it is a copy of the capture.

    Raises:
        Refused: a layer is called twice.
    """
    layers, held = Layers(short.graph, short.copies), module.tensors()
    read = set(short.graph.nodes)  # without complex weights, whose parts are nodes of their own
    names = {node: name for node, name in short.names.items() if name in held and node in read}
    weights = layers.weights(names)
    whole = _Whole(short.graph, short.copies, names, weights, [[] for _ in weights])
    known = whole.known
    constants = {known[node]: value for node, value in short.constants.items()}
    constants |= {
        node: held[name].detach() for name, node in whole.held.items() if node not in constants
    }
    return dataclasses.replace(
        short,
        graph=whole.graph,
        constants=constants,
        names={node: name for name, node in whole.held.items()},
        input=known[short.input],
        positions=short.positions and known[short.positions],
        output=known[short.output],
        memory=tuple(known[node] for node in short.memory),
        module=module,
        short=short if layers.left_out() >= FEWEST else None,
    )


# A flat graph


@dataclass(eq=False)
class Repeated:
    """A flat graph with one layer of each kind, and the weights and states of the other layers.

    Attributes:
        graph: with edges.
        copies: as in Layers.
        weights: names of the weights of each site.
        states: indices of the states of each site.
    """

    graph: Graph
    copies: Mapping[str, str]
    weights: list[Names]
    states: list[list[int]]

    def __deepcopy__(self, memo: Any) -> "Repeated":
        return self

    def whole(self, short: Graph, marks: bool = False) -> Graph:
        """Return the graph of the whole module. short: `graph`, or its form in half precision.
        marks: whether each copy of a layer is one mark (ops/layers.py).
        """
        held = {node: str(node.target) for node in short.nodes if node.op == "get_attr"}
        return _Whole(short, self.copies, held, self.weights, self.states, marks).graph


class Flat(NamedTuple):
    """A flat graph, the caches of its states, and which of its layers are alike."""

    graph: GraphModule
    caches: list[Cache]
    repeated: Repeated | None = None


def completed(short: GraphModule, calls: Calls, whole: Capture) -> Flat | None:
    """Add the layers that were left out to a flat graph; None if layers share a state.

    Args:
        short: flat graph of the calls.
        whole: the module with all layers.
    """
    capture = calls.values.capture
    layers, past = Layers(short.graph, capture.copies), _states(short.graph)
    own = layers.states(past)
    if sum(map(len, own)) != len(past):
        return None
    held = {node: str(node.target) for node in short.graph.nodes if node.op == "get_attr"}
    root: dict[str, Any] = dict(short.named_parameters(remove_duplicate=False))
    root |= dict(short.named_buffers())
    weights, tensors = layers.weights(held), whole.module.tensors()
    computed = {f"constants.{name}": node for node, name in calls.weight_names.items()}
    for index, (site, names) in enumerate(zip(layers.sites, weights, strict=True)):
        if site.layer not in capture.copies:
            continue
        first = capture.copies[site.layer]
        of = {
            n: tensors.get(_of_layer(name, first, site.layer)) for n, name in capture.names.items()
        }
        for name, other in names.items():
            value = tensors.get(other)
            if name in computed and name not in tensors:
                value, names[name] = _value(capture, computed[name], of), f"{name}_{index}"
            if value is None or value is tensors.get(name):
                names[name] = name
            elif names[name] not in root:
                is_weight = value.is_floating_point()
                root[names[name]] = torch.nn.Parameter(value, False) if is_weight else value
    of_state = dict(zip(past, calls.caches, strict=True))
    caches, states = _caches(layers, [[of_state[s] for s in states] for states in own])
    repeated = Repeated(short.graph, capture.copies, weights, states)
    return Flat(GraphModule(root, repeated.whole(short.graph)), caches, repeated)


def _value(capture: Capture, node: Node, of: Mapping[Node, Tensor | None]) -> Tensor:
    """Return a value that depends on weights alone. of: other numbers for some weights."""
    if node in capture.constants:
        own = of.get(node)
        return (capture.constants[node] if own is None else own).detach()
    inputs = {other: _value(capture, other, of) for other in node.all_input_nodes}
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
    with torch.no_grad():
        value: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return value


def _caches(layers: Layers, own: list[list[Cache]]) -> tuple[list[Cache], list[list[int]]]:
    """Return the caches of all sites, ordered and numbered as in Calls, and for each site the
    indices of its caches. own: caches of each segment (Layers.segments).
    """
    attends = [0]  # attentions before each segment
    for nodes in layers.segments:
        attends.append(attends[-1] + sum(node.target is ops.attend for node in nodes))
    found: list[Cache] = []
    places: list[list[int]] = [[] for _ in layers.sites]
    for recurrent in (False, True):  # states stand behind caches
        first, before = len(found), 0
        for index, (segment, *_) in enumerate(layers.sites):
            for cache in [one for one in own[segment] if bool(one.values) == recurrent]:
                layer, name = cache.layer - attends[segment] + before, cache.name
                if name not in ("key", "value"):
                    name = f"{name.rstrip(string.digits)}{len(found) - first}"
                    layer = found[-1].layer if found else 0
                places[index].append(len(found))
                found.append(cache._replace(layer=layer, name=name))
            before += attends[segment + 1] - attends[segment]
    return found, places
