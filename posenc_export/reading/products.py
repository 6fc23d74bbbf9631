"""The linear layers and tables of a traced module, and what they read."""

import operator
from collections import Counter
from typing import Any, Iterator, NamedTuple

import torch
from torch.fx import Node

from posenc_export.ops import experts
from posenc_export.reading.values import LAYOUT, aten, inputs_of, packet
from posenc_export.reading.whole import Capture

EXPERTS = experts.RUN
LINEAR, TABLE = aten.linear.default, aten.embedding.default
NORMS = {aten.layer_norm.default, aten.rms_norm.default}
CHOICES = {aten.topk, aten.sort, aten.argsort, aten.argmax}
SHARES = {aten.softmax, aten._softmax, aten.sum}  # between a router's product and its top-k
# Operators that pass numbers on, beside those of LAYOUT.
PASSING = LAYOUT | {
    aten.chunk, aten.split, aten.split_with_sizes, aten.slice, aten.to, operator.getitem,
}  # fmt: skip


class Scaled(NamedTuple):
    """A value that only linear layers read, and whose columns weights multiply.

    Args:
        factors: names of weights [K]; entry k multiplies column k of the value.
        readers: names of the weights [N,K] of the linear layers.
    """

    factors: tuple[str, ...]
    readers: tuple[str, ...]


class Products:
    """The linear layers and token tables of a graph, by the names of their weights.

    Args:
        captured: the module. Weights that other operators read too are left out.

    Attributes:
        linear: nodes of the products with each weight [N,K], without routers.
        routers: names of the weights whose largest products choose something, such as experts.
        tables: names of the weights of tables.
        experts: names of the weights [N,K,M] of experts that one operation computes.
    """

    def __init__(self, captured: Capture) -> None:
        own = {*captured.parameters}
        self._constants = captured.constants
        self._names = {node: name for node, name in captured.names.items() if name in own}
        self.linear: dict[str, list[Node]] = {}
        self.tables: list[str] = []
        self.experts: list[str] = []
        for node in captured.graph.nodes:
            if node.target is EXPERTS:
                matrices: Any = node.args[2:5]
                self.experts += [self._names[one] for one in matrices if one in self._names]
            if node.target not in (LINEAR, TABLE):
                continue
            weight: Any = node.args[node.target is LINEAR]
            if weight not in self._names or {u.target for u in weight.users} - {LINEAR, TABLE}:
                continue
            if node.target is LINEAR:
                self.linear.setdefault(self._names[weight], []).append(node)
            elif self._names[weight] not in self.tables:
                self.tables.append(self._names[weight])
        self.routers = [name for name, uses in self.linear.items() if any(map(_chooses, uses))]
        self.linear = {n: uses for n, uses in self.linear.items() if n not in self.routers}

    def __deepcopy__(self, memo: Any) -> "Products":
        """Return itself: copies of a reading share the module that was read."""
        return self

    def of_units(self) -> list[str]:
        """Return the linear layers that read the hidden units of an MLP: element-wise functions of
        the outputs of other linear layers.
        """
        return [name for name, uses in self.linear.items() if all(map(self._reads_units, uses))]

    def with_same_input(self) -> dict[str, str]:
        """Return by linear layer the first one that reads the same value, if it is another."""
        first: dict[tuple[Any, ...], str] = {}
        read = {name: tuple(use.args[0] for use in uses) for name, uses in self.linear.items()}
        found = {name: first.setdefault(values, name) for name, values in read.items()}
        return {name: other for name, other in found.items() if other != name}

    def scaled(self) -> Iterator[Scaled]:
        """Yield the results of norms and other products with a weight that only linear layers read.
        No other node reads these weights.
        """
        stored = Counter(weight.data_ptr() for weight in self._constants.values())
        once = {
            node: name
            for node, name in self._names.items()
            if len(node.users) == 1 and stored[self._constants[node].data_ptr()] == 1
        }
        values: dict[Any, None] = dict.fromkeys(
            use.args[0] for uses in self.linear.values() for use in uses
        )
        for value in values:
            readers: list[Any] = [u.args[1] for u in value.users if u.target is LINEAR]
            factors = _factors(value)
            if (
                factors
                and len(readers) == len(value.users)
                and all(weight in once for weight in (*factors, *readers))
                and all(one.meta["val"].shape == value.meta["val"].shape[-1:] for one in factors)
            ):
                yield Scaled(*(tuple(once[w] for w in some) for some in (factors, readers)))

    def _reads_units(self, product: Node) -> bool:
        seen, waiting, functions = set[Any](self._constants), [product.args[0]], 0
        while waiting:
            node: Any = waiting.pop()
            if node in seen or node.target is LINEAR:
                continue
            seen.add(node)
            acts = _is_pointwise(node)
            functions += acts
            if not acts and packet(node) not in PASSING:
                return False
            waiting += [one for one in inputs_of(node) if not isinstance(_value(one), torch.SymInt)]
        return functions > 0


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _chooses(product: Node) -> bool:
    """Return whether indices of the largest products, or of functions of them, are computed."""
    seen, waiting = set[Node](), list(product.users)
    while waiting:
        node = waiting.pop()
        if packet(node) in CHOICES:
            return True
        if node not in seen and (_is_pointwise(node) or packet(node) in PASSING | SHARES):
            seen.add(node)
            waiting += node.users
    return False


def _factors(value: Node) -> list[Node]:
    """Return the inputs of a node whose entries multiply the columns of its value."""
    if value.target in NORMS:
        weights = value.args[2 : 4 if value.target is aten.layer_norm.default else 3]
        found = [weight for weight in weights if isinstance(weight, Node)]
        return found if weights and weights[0] is not None else []
    sides = [side for side in value.args if isinstance(side, Node)]
    if len(sides) != 2 or value.kwargs:
        return []
    wide, narrow = sorted(sides, key=lambda side: -len(_value(side).shape))
    if value.target is aten.mul.Tensor:
        return [narrow]
    if value.target is aten.add.Tensor and wide.target is aten.mul.Tensor and len(wide.users) == 1:
        inner = _factors(wide)
        return [*inner, narrow] if inner else []
    return []


def _value(node: Node) -> Any:
    return node.meta.get("val")
