"""Complex numbers of a graph as pairs of real ones, which every target has."""

from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from posenc_export.reading.refused import refuse

aten = torch.ops.aten
Pair = Tuple[Any, Any]  # nodes of the real and of the imaginary part
# What is done to each part alone.
_LINEAR = set(
    "reshape permute transpose unsqueeze squeeze expand slice select index cat neg sum".split()
)
_LINEAR |= set(
    "stack flatten unflatten clone repeat_interleave repeat narrow index_select roll".split()
)
_LINEAR |= {"flip", "gather", "cumsum", "mean", "numpy_T", "movedim", "t", "embedding", "alias"}
_PRODUCTS = {"mul", "matmul", "mm", "bmm", "einsum"}


def real_numbers(graph: Graph, constants: Dict[Node, Tensor]) -> None:
    """Replace complex values of a graph by their parts. Refuses operators that it does not know."""
    _Parts(graph, constants).replace()


def is_complex(node: Any) -> bool:
    """Return whether a node gives complex numbers."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.is_complex()


class _Parts:
    """parts: of each complex node."""

    def __init__(self, graph: Graph, constants: Dict[Node, Tensor]) -> None:
        self.graph, self.constants = graph, constants
        self.parts: Dict[Node, Pair] = {}
        self.at: Node = next(iter(graph.nodes))  # the node that is replaced

    def replace(self) -> None:
        replaced: List[Node] = []
        for node in list(self.graph.nodes):
            takes = any(is_complex(a) for a in node.all_input_nodes)
            if node.op == "output" and takes:
                refuse(node.all_input_nodes[0], "gives complex numbers")
            if not (takes or is_complex(node)):
                continue
            self.at = node
            replaced.append(node)
            with self.graph.inserting_before(node):
                if node in self.constants:
                    self.parts[node] = self._constant(node)
                elif is_complex(node):
                    self.parts[node] = self._pair(node)
                else:
                    node.replace_all_uses_with(self._real(node))
        for node in reversed(replaced):
            self.graph.erase_node(node)

    def _constant(self, node: Node) -> Pair:
        held = torch.view_as_real(self.constants.pop(node).resolve_conj())
        found = []
        for part, name in enumerate(("real", "imaginary")):
            new = self.graph.placeholder(f"{node.name}_{name}")
            new.meta = {**node.meta, "val": torch.view_as_real(node.meta["val"]).select(-1, part)}
            self.constants[new] = held[..., part].contiguous()
            found.append(new)
        return found[0], found[1]

    def _new(self, target: Any, *args: Any, **named: Any) -> Node:
        """A node whose value has the shape that the operator gives."""
        node = self.graph.call_function(target, args, named)
        node.meta = {**self.at.meta}
        values = map_arg((args, named), lambda a: a.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def _of(self, value: Any) -> Pair:
        if isinstance(value, complex):
            return value.real, value.imag
        return self.parts[value] if is_complex(value) else (value, None)

    def _pair(self, node: Node) -> Pair:
        """The parts of a node's complex value."""
        name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        args = node.args
        if name == "view_as_complex":
            return self._new(aten.select.int, args[0], -1, 0), self._new(
                aten.select.int, args[0], -1, 1
            )
        if name == "complex":
            return args[0], args[1]
        if name in ("polar", "exp"):
            length, angle = (args[0], args[1]) if name == "polar" else self._of(args[0])
            length = length if name == "polar" else self._new(aten.exp.default, length)
            turns = self._new(aten.cos.default, angle), self._new(aten.sin.default, angle)
            return self._by(aten.mul.Tensor, length, turns[0]), self._by(
                aten.mul.Tensor, length, turns[1]
            )
        if name in ("_conj", "conj", "conj_physical", "_conj_physical"):
            real, imaginary = self._of(args[0])
            return real, self._new(aten.neg.default, imaginary)
        if name in ("resolve_conj", "lift_fresh_copy"):
            return self._of(args[0])
        if name in _PRODUCTS:
            return self._product(node)
        if name in ("add", "sub") and len(args) == 2 and not node.kwargs:
            return self._sum(node)
        if name == "div" and not is_complex(args[1]):
            real, imaginary = self._of(args[0])
            return self._by(node.target, real, args[1]), self._by(node.target, imaginary, args[1])
        if name in _LINEAR:
            real, imaginary = (
                self._new(node.target, *self._chosen(node.args, part), **node.kwargs)
                for part in (0, 1)
            )
            return real, imaginary
        refuse(node, "computes with complex numbers in a way that has no form in real ones here")

    def _chosen(self, args: Any, part: int) -> Any:
        return map_arg(args, lambda a: self.parts[a][part] if a in self.parts else a)

    def _by(self, target: Any, a: Any, b: Any) -> Node:
        return self._new(target, a, b)

    def _product(self, node: Node) -> Pair:
        target: Any = node.target
        by_list = target.overloadpacket.__name__ == "einsum"
        a, b = node.args[1] if by_list else node.args[:2]  # type: ignore[misc]
        (a_real, a_imaginary), (b_real, b_imaginary) = self._of(a), self._of(b)

        def times(one: Any, other: Any) -> Node:
            return (
                self._new(target, node.args[0], [one, other])
                if by_list
                else self._new(target, one, other)
            )

        if b_imaginary is None:
            return times(a_real, b_real), times(a_imaginary, b_real)
        if a_imaginary is None:
            return times(a_real, b_real), times(a_real, b_imaginary)
        real = self._new(aten.sub.Tensor, times(a_real, b_real), times(a_imaginary, b_imaginary))
        return real, self._new(
            aten.add.Tensor, times(a_real, b_imaginary), times(a_imaginary, b_real)
        )

    def _sum(self, node: Node) -> Pair:
        (a_real, a_imaginary), (b_real, b_imaginary) = (
            self._of(node.args[0]),
            self._of(node.args[1]),
        )
        if a_imaginary is None or b_imaginary is None:
            refuse(node, "adds real and complex numbers")
        return self._by(node.target, a_real, b_real), self._by(
            node.target, a_imaginary, b_imaginary
        )

    def _real(self, node: Node) -> Any:
        """A real value that is made of complex ones."""
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if name in ("view_as_real", "real", "imag", "abs", "angle"):
            real, imaginary = self._of(node.args[0])
            if name == "view_as_real":
                return self._new(aten.stack.default, [real, imaginary], -1)
            if name == "abs":
                return self._new(aten.hypot.default, real, imaginary)
            if name == "angle":
                return self._new(aten.atan2.default, imaginary, real)
            return real if name == "real" else imaginary
        if name in ("sym_size", "sym_numel"):
            return self._new(node.target, *self._chosen(node.args, 0))
        return refuse(node, "makes real numbers of complex ones in a way that is not known here")
