"""Layers that are alike are worked on once: one part of each kind stays in a graph, and the others
are added to the result as copies.

A part is what a captured graph computes between two values that alone carry the tokens on, such as
the hidden states before and after an attention.
"""

import dataclasses
import functools
import itertools
import operator
import string
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from posenc_export import ops
from posenc_export.ops.layers import AGAIN, BEGIN, END
from posenc_export.reading.calls import Cache, Calls
from posenc_export.reading.graphs import of_length_alone, results_of
from posenc_export.reading.layers_once import bits, complete
from posenc_export.reading.steps import Attend
from posenc_export.reading.values import LAYOUT, inputs_of, packet
from posenc_export.reading.whole import Capture

FEWEST = 60  # a graph is not shortened by fewer nodes
LONG = 0.5  # a value that is needed over a larger share of the nodes is read by all layers
Key = Tuple[Any, ...]


@dataclass(eq=False)
class Part:
    """A part of a captured graph.

    Attributes:
        nodes: that depend on the tokens, in order; the last one carries them on.
        entry: the value that it reads; None for the first part.
        constants: values that depend on weights alone, in the order in which they are met, which
            is the same in parts that are alike.
    """

    nodes: List[Node]
    entry: Optional[Node]
    constants: List[Node] = dataclasses.field(default_factory=list)


@dataclass(eq=False)
class Repeated:
    """A flat graph in which most layers are missing, and what the copies of a part read.

    Attributes:
        graph: with a node ops.passed at the end of each part but the last.
        templates: of each part of the module, the index of the part in the graph that it is, or is
            a copy of.
        weights: of each part, the names of its weights by those of its template.
        states: of each part, the indices of its states.
    """

    graph: Graph
    templates: List[int]
    weights: List[Dict[str, str]]
    states: List[List[int]]

    def __deepcopy__(self, memo: Any) -> "Repeated":
        return self

    def marked(self, short: Graph) -> Graph:
        """Return the graph of the whole module, in which each copy of a part is one mark
        (reading/layers_once.py). short: `graph`, perhaps in half precision.
        """
        return _Marked(self, short).graph


class Flat(NamedTuple):
    """A flat graph, the caches of its states, and which of its layers are alike."""

    graph: GraphModule
    caches: List[Cache]
    repeated: Optional[Repeated] = None


class Shortened:
    """A copy of a captured graph, with one part of each kind.

    Args:
        whole: the graph, which stays as it is.
        parts: its parts; none for one that is all of it.
        templates: of each part, as in Repeated.

    Attributes:
        capture: of the kept parts.
        ends: nodes of its graph that end parts, but the last part.
    """

    def __init__(
        self, whole: Capture, parts: Sequence[Part] = (), templates: Sequence[int] = (0,)
    ) -> None:
        self.whole, self.templates = whole, list(templates)
        self.parts = parts = parts or [Part(list(whole.graph.nodes), None)]
        self.kept = sorted(set(templates))
        tokens = {n: i == templates[i] for i, part in enumerate(parts) for n in part.nodes}
        entries = {parts[a].nodes[-1]: parts[b].entry for a, b in itertools.pairwise(self.kept)}
        graph, self.known = Graph(), dict[Node, Node]()
        for node in whole.graph.nodes:
            # What only parts that are left out can read is left out, too.
            if tokens.get(node, self.known.keys() >= set(node.all_input_nodes)):
                self.known[node] = graph.node_copy(node, self.known.__getitem__)
                if entry := entries.get(node):
                    self.known[entry] = self.known[node]
        graph.eliminate_dead_code()
        self.ends = [self.known[parts[index].nodes[-1]] for index in self.kept[:-1]]
        read = {old: new for old, new in self.known.items() if old in whole.constants and new.users}
        for node in self.known.keys() & whole.constants.keys() - read.keys():
            graph.erase_node(self.known[node])
        self.capture = dataclasses.replace(
            whole,
            graph=graph,
            constants={new: whole.constants[old] for old, new in read.items()},
            names={new: whole.names[old] for old, new in read.items() if old in whole.names},
            input=self.known[whole.input],
            positions=whole.positions and self.known[whole.positions],
            output=self.known[whole.output],
            memory=tuple(self.known[node] for node in whole.memory),
        )

    @classmethod
    def of(cls, whole: Capture) -> "Shortened":
        """Return the graph with parts left out, or with one part if there are few of a kind."""
        parts, kinds = _Parts(whole).found()
        templates = [kinds.index(kind) for kind in kinds]
        left_out = [part for i, part in enumerate(parts) if templates[i] != i]
        if sum(len(part.nodes) for part in left_out) < FEWEST:
            return cls(whole)
        try:
            return cls(whole, parts, templates)
        except KeyError:  # a value within a part that is left out is read by a later one
            return cls(whole)

    def completed(self, short: GraphModule, calls: Calls) -> Optional[Flat]:
        """Add the parts that were left out to a flat graph; None if its parts do not stand apart.

        Args:
            short: flat graph of the calls, with a node ops.passed at the end of each part.
        """
        if len(self.parts) == 1:
            return Flat(short, calls.caches)
        bodies = _bodies(short.graph)
        placeholders = _states(short.graph)
        present = dict(zip(placeholders, results_of(short.graph)[1:], strict=True))
        own = [[s for s in placeholders if present[s] in body] for body in bodies]
        if len(bodies) != len(self.kept) or sum(map(len, own)) != len(placeholders):
            return None
        root: Dict[str, Any] = dict(short.named_parameters(remove_duplicate=False))
        root |= dict(short.named_buffers())
        weights = [self._weights(index, calls, root) for index in range(len(self.parts))]
        held = dict(zip(placeholders, calls.caches, strict=True))
        caches, states = self._caches(calls, [[held[s] for s in states] for states in own])
        repeated = Repeated(short.graph, self.templates, weights, states)
        graph = repeated.marked(short.graph)
        complete(graph)
        return Flat(GraphModule(root, graph), caches, repeated)

    def _weights(self, index: int, calls: Calls, root: Dict[str, Any]) -> Dict[str, str]:
        """Return the names of the weights of a part by those of its template. Weights that the
        flat graph lacks are added to `root`.
        """
        found: Dict[str, str] = {}
        held_by, read_by = self.parts[self.templates[index]], self.parts[index]
        for held, own in zip(held_by.constants, read_by.constants, strict=True):
            known = calls.weight_names.get(self.known[held])
            name = self.whole.names.get(held, f"constants.{known}")
            if known is None or name not in root:
                continue
            found[name] = self.whole.names.get(own, name if own is held else f"{name}_{index}")
            if found[name] not in root:
                value = _value(self.whole, own)
                is_weight = value.is_floating_point()
                root[found[name]] = torch.nn.Parameter(value, False) if is_weight else value
        return found

    def _caches(self, calls: Calls, own: List[List[Cache]]) -> Tuple[List[Cache], List[List[int]]]:
        """Return the caches of all parts, in the order and with the numbers of Calls, and the
        places of those of each part. own: of each kept part.
        """
        attends = [0]  # before each kept part, and of all
        for end in (*self.ends, calls.values.out):
            nodes = calls.order[: calls.order.index(end) + 1]
            attends.append(sum(isinstance(calls.steps[node], Attend) for node in nodes))
        found: List[Cache] = []
        places: List[List[int]] = [[] for _ in self.templates]
        for recurrent in (False, True):  # states stand behind caches
            first, before = len(found), 0
            for index, place in enumerate(map(self.kept.index, self.templates)):
                for cache in [one for one in own[place] if bool(one.values) == recurrent]:
                    layer, name = cache.layer - attends[place] + before, cache.name
                    if name not in ("key", "value"):
                        name = f"{name.rstrip(string.digits)}{len(found) - first}"
                        layer = found[-1].layer if found else 0
                    places[index].append(len(found))
                    found.append(cache._replace(layer=layer, name=name))
                before += attends[place + 1] - attends[place]
        return found, places


class _Parts:
    """The parts of a captured graph, and which of them are alike."""

    def __init__(self, whole: Capture) -> None:
        self.whole = whole
        apart = of_length_alone(whole.graph, whole.input) | set(whole.constants)
        apart |= {whole.positions} if whole.positions else set()
        self.order = [n for n in whole.graph.nodes if n.op != "output" and n not in apart]
        self.data = set(self.order)
        self.of_weights = self._of_weights(apart)
        self.known: Dict[Any, int] = {}  # numbers of expressions
        self.numbers: Dict[Node, int] = {}  # of values without tokens

    def found(self) -> Tuple[List[Part], List[Key]]:
        """Return the parts, and values that are equal for those that are alike."""
        parts = list(self._parts())
        return parts, [self._key(part) for part in parts]

    def _of_weights(self, apart: Set[Node]) -> Set[Node]:
        found = set(self.whole.constants)
        for node in self.whole.graph.nodes:
            inner = node.all_input_nodes
            if node in apart and node.op == "call_function" and inner and found.issuperset(inner):
                found.add(node)
        return found

    def _parts(self) -> Iterator[Part]:
        """Yield the parts: they end where one value alone is needed later, of the shape that most
        such values have, beside those that are needed over most of the graph.
        """
        place = {node: index for index, node in enumerate(self.order)}
        end = len(self.order)
        last: Dict[Node, int] = {}  # place of the last reader of more than the shape
        for node, index in place.items():
            readers = (user for user in node.users if user in self.data or user.op == "output")
            last[node] = max((place.get(user, end) for user in readers), default=index)
        spans = {n for n, index in place.items() if last[n] - index > LONG * end}
        alive, ends = set[Node](), []
        for index, node in enumerate(self.order):
            alive = {other for other in alive if last[other] > index}
            if node not in spans:
                if not alive and last[node] > index:
                    ends.append(node)
                alive |= {node} if last[node] > index else set()
        shapes = Counter(_shape(node) for node in ends)
        common = max(shapes, key=shapes.__getitem__, default=None)
        start, entry = 0, None
        for node in ends:
            if _shape(node) == common:
                yield Part(self.order[start : place[node] + 1], entry)
                start, entry = place[node] + 1, node
        yield Part(self.order[start:], entry)

    def _key(self, part: Part) -> Key:
        """Return a value that is equal for parts that compute the same with other weights."""
        own = {node: index for index, node in enumerate(part.nodes)}
        slots: Dict[Node, str] = {}

        def number(node: Node) -> Any:
            if node is part.entry:
                return "entry"
            if node in own:
                return f"own {own[node]}"
            if node in self.data:
                return f"value {node.name}"
            if node in self.of_weights:
                if node not in slots:
                    slots[node] = f"weight {len(slots)} {self._weight(node, number)}"
                    part.constants.append(node)
                return slots[node]
            if packet(node) in LAYOUT and inputs_of(node)[0] in self.of_weights:
                return self._expression(node, number)
            return self._number(node)

        key = [self._expression(node, number) for node in part.nodes]
        first = None if part.entry is None else _shape(part.entry)
        return (*key, first, _shape(part.nodes[-1]) if part.nodes else None)

    def _weight(self, node: Node, number: Any) -> Any:
        """Return what parts that are alike have in common in a constant."""
        if packet(node) in LAYOUT:  # stays an operator of a call
            return self._expression(node, number)
        held = node.meta["val"]
        if held.numel() > 1 and held.is_floating_point():
            return _shape(node)
        return _content(_value(self.whole, node))

    def _number(self, node: Node) -> int:
        """Return a number that values without tokens share if they are equal."""
        if node not in self.numbers:
            if node in self.whole.constants:
                key = _content(self.whole.constants[node])
            elif node.op == "placeholder":
                key = node.name
            elif not isinstance(node.meta.get("val"), Tensor):
                key = str(node.meta.get("val"))
            else:
                key = self._expression(node, self._without_tokens)
            self.numbers[node] = self.known.setdefault(key, len(self.known))
        return self.numbers[node]

    def _without_tokens(self, node: Node) -> Any:
        return f"shape {_shape(node)}" if node in self.data else self._number(node)

    def _expression(self, node: Node, number: Any) -> Any:
        values = [number(other) for other in inputs_of(node)]
        left = iter(values)
        named = torch.fx.node.map_arg((node.args, node.kwargs), lambda _: next(left))
        return str(node.target), repr(named)


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else str(type(value))


def _content(value: Tensor) -> Any:
    """Return a value that is equal for tensors of the same bits."""
    return tuple(value.shape), str(value.dtype), bits(value)


def _value(whole: Capture, node: Node) -> Tensor:
    """Return a value that depends on weights alone."""
    if node in whole.constants:
        return whole.constants[node].detach()
    of = functools.partial(_value, whole)
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), of)
    with torch.no_grad():
        value: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return value


def _states(graph: Graph) -> List[Node]:
    return [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("states_")]


def _bodies(graph: Graph) -> List[List[Node]]:
    """Return the nodes of each part, the last of which ends it, by their order."""
    found: List[List[Node]] = [[]]
    for node in graph.nodes:
        if node.op == "call_function":
            found[-1].append(node)
            if node.target is ops.passed:
                found.append([])
    return found


class _Marked:
    """The graph of all parts, in which each copy of a part is one mark, while it is made.

    Attributes:
        known: its nodes by those of the short graph.
        results: of each kept part that has copies, what it returns.
    """

    def __init__(self, repeated: Repeated, short: Graph) -> None:
        self.repeated, self.graph, self.known = repeated, Graph(), dict[Node, Node]()
        self.results: Dict[int, List[Node]] = {}
        self.held: Dict[str, Node] = {}
        inputs, past = [n for n in short.nodes if n.op == "placeholder"], _states(short)
        for node in [n for n in inputs if n not in past and n.name != "index"]:
            self.known[node] = self.graph.node_copy(node)
        count = sum(map(len, repeated.states))
        self.states = [self.graph.placeholder(f"states_{i}") for i in range(count)]
        for state in self.states:
            state.meta = dict(past[0].meta)
        self.known |= {n: self.graph.node_copy(n) for n in inputs if n.name == "index"}
        for node in [n for n in short.nodes if n.op == "get_attr"]:
            self.known[node] = self._weight(str(node.target), node)
        y, *results = results_of(short)
        present_of, present = dict(zip(past, results, strict=True)), dict[int, Node]()
        kept, bodies = sorted(set(repeated.templates)), _bodies(short)
        own = [[s for s in past if present_of[s] in body] for body in bodies]
        entry: List[Node] = []  # of the next part; none of the first
        for index, template in enumerate(repeated.templates):
            place = kept.index(template)
            body = bodies[place]
            ends = [node for node in body[-1:] if node.target is ops.passed]
            read = [bodies[place - 1][-1] for _ in entry] + own[place]
            values = entry + [self.states[i] for i in repeated.states[index]]
            given = [end.args[0] for end in ends] + [present_of[state] for state in own[place]]
            if template == index:
                made = self._first(template, body[: -1 if ends else None], read, values, given)
            else:
                made = self._again(index, values)
            entry, new = made[: len(ends)], made[len(ends) :]
            present |= zip(repeated.states[index], new, strict=True)
        self.graph.output((self.known[y], *map(present.__getitem__, range(count))))

    def _first(
        self, part: int, body: List[Node], read: List[Node], values: List[Node], given: Any
    ) -> List[Node]:
        """Copy a part that is kept, between marks if it has copies; return its results."""
        is_marked = self.repeated.templates.count(part) > 1
        if is_marked:
            values = self._mark(BEGIN, part, values, self._weights(part), values)
        self.known |= zip(read, values, strict=True)
        for node in body:
            self.known[node] = self.graph.node_copy(node, self.known.__getitem__)
        results = [self.known[node] for node in given]
        if is_marked:
            results = self.results[part] = self._mark(END, part, results, [], results)
        return results

    def _again(self, part: int, values: List[Node]) -> List[Node]:
        template = self.repeated.templates[part]
        return self._mark(AGAIN, template, values, self._weights(part), self.results[template])

    def _mark(
        self, what: str, part: int, values: List[Node], weights: List[Node], like: List[Node]
    ) -> List[Node]:
        mark = self.graph.call_function(ops.layer, (what, str(part), values + weights, like))
        items = [self.graph.call_function(operator.getitem, (mark, i)) for i in range(len(like))]
        for item, value in zip(items, like, strict=True):
            item.meta = dict(value.meta)
        return items

    def _weights(self, part: int) -> List[Node]:
        """Return the weights of a part alone, in the order of those of its template."""
        of = self.repeated.weights
        named = of[self.repeated.templates[part]]
        return [self._weight(of[part][name], self.held[own]) for name, own in named.items()]

    def _weight(self, name: str, like: Node) -> Node:
        if name not in self.held:
            self.held[name] = self.graph.get_attr(name)
            self.held[name].meta = dict(like.meta)
        return self.held[name]
