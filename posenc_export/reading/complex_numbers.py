"""Complex numbers of a graph as pairs of real ones, which every target has."""

from typing import Any, Callable

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from posenc_export.reading.refused import refuse

aten = torch.ops.aten
Pair = tuple[Any, Any]  # nodes of the real and of the imaginary part
# Operators that act on each part alone. Products do if one of their factors is real.
_LINEAR = set(
    """reshape permute transpose unsqueeze squeeze expand slice select index cat neg sum stack
    flatten unflatten clone repeat_interleave repeat narrow index_select roll flip gather cumsum
    mean numpy_T movedim t embedding alias add sub div""".split()
)
_PRODUCTS = {"mul", "matmul", "mm", "bmm", "einsum"}


def real_numbers(graph: Graph, constants: dict[Node, Tensor]) -> None:
    """Replace complex values of a graph by their parts. Refused: an unknown operator reads one."""
    _Parts(graph, constants).replace()


def is_complex(node: Any) -> bool:
    """Return whether a node gives complex numbers, or an argument is one."""
    value = node.meta.get("val") if isinstance(node, Node) else node
    return value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)


class _Parts:
    """parts: of each complex node."""

    def __init__(self, graph: Graph, constants: dict[Node, Tensor]) -> None:
        self.graph, self.constants = graph, constants
        self.parts: dict[Node, Pair] = {}
        self.at: Node = next(iter(graph.nodes))  # the node that is replaced

    def replace(self) -> None:
        replaced: list[Node] = []
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
        return (value.real, value.imag) if isinstance(value, complex) else self.parts[value]

    def _pair(self, node: Node) -> Pair:
        """Return the parts of a node's complex value."""
        name, args = node.target.overloadpacket.__name__, node.args  # type: ignore[union-attr]
        name = name.removeprefix("_")
        if name == "view_as_complex":
            return self._both(lambda part: self._new(aten.select.int, args[0], -1, part))
        if name == "complex":
            return args[0], args[1]
        if name in ("polar", "exp"):
            length, angle = args if name == "polar" else self._of(args[0])
            length = length if name == "polar" else self._new(aten.exp.default, length)
            turns = aten.cos.default, aten.sin.default
            return self._both(
                lambda part: self._new(aten.mul.Tensor, length, self._new(turns[part], angle))
            )
        if name in ("conj", "conj_physical"):
            real, imaginary = self._of(args[0])
            return real, self._new(aten.neg.default, imaginary)
        if name in ("resolve_conj", "lift_fresh_copy"):
            return self._of(args[0])
        operands: Any = args[1] if name == "einsum" else args[:2]
        if name in _PRODUCTS and all(map(is_complex, operands)):
            return self._product(node, *map(self._of, operands))
        if name in ("add", "sub") and not all(map(is_complex, operands)):
            refuse(node, "adds real and complex numbers")
        if name in _LINEAR | _PRODUCTS and not (name == "div" and is_complex(args[1])):
            return self._both(
                lambda part: self._new(node.target, *self._chosen(args, part), **node.kwargs)
            )
        refuse(node, "computes with complex numbers in a way that has no form in real ones here")

    def _both(self, of: Callable[[int], Any]) -> Pair:
        return of(0), of(1)

    def _chosen(self, args: Any, part: int) -> Any:
        return map_aggregate(args, lambda a: self._of(a)[part] if is_complex(a) else a)

    def _product(self, node: Node, a: Pair, b: Pair) -> Pair:
        def times(i: int, j: int) -> Any:
            given = (node.args[0], [a[i], b[j]]) if isinstance(node.args[1], list) else (a[i], b[j])
            return self._new(node.target, *given)

        return (
            self._new(aten.sub.Tensor, times(0, 0), times(1, 1)),
            self._new(aten.add.Tensor, times(0, 1), times(1, 0)),
        )

    def _real(self, node: Node) -> Any:
        """Return the node of a real value that is computed from complex ones."""
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
