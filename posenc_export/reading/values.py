"""A captured graph with the values of one run, which show what its operators do."""

from typing import Any, Callable, Iterable, Sequence

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from posenc_export.reading.axes import Counts, Roles, shape_of
from posenc_export.reading.refused import refuse
from posenc_export.reading.whole import Capture

aten = torch.ops.aten
# Operators that rearrange or repeat entries.
LAYOUT = {
    aten.view, aten.reshape, aten._unsafe_view, aten.permute, aten.transpose, aten.unsqueeze,
    aten.squeeze, aten.expand, aten.repeat_interleave, aten.clone, aten.contiguous, aten.alias,
    aten.flatten, aten.unflatten, aten.detach, aten.lift_fresh_copy, aten.t,
}  # fmt: skip
# Operators that take a shape, and the argument that is the shape.
SHAPED: dict[Any, int] = {
    aten.view: 1, aten.reshape: 1, aten._unsafe_view: 1, aten.expand: 1, aten.full: 0,
    aten.zeros: 0, aten.ones: 0, aten.empty: 0, aten.new_zeros: 1, aten.new_ones: 1,
    aten.new_full: 1, aten.new_empty: 1,
}  # fmt: skip
# Operators that read only the shape of their input.
LIKE = {
    aten.ones_like, aten.zeros_like, aten.full_like, aten.empty_like, aten.new_zeros,
    aten.new_ones, aten.new_full, aten.new_empty,
}  # fmt: skip
SHAPE_ALONE = LIKE | {aten.sym_size, aten.sym_numel}  # operators that read no numbers of a tensor


def zero_scores(shape: list[Any]) -> Tensor:
    """Stand for scores in a graph that computes the biases which a module adds to scores."""
    return torch.zeros(shape)


SHAPED[zero_scores] = 0


def running_max(x: Tensor, axes: list[int]) -> Tensor:
    """Return the maximum of each entry and those before it on an axis: cummax without indices."""
    return x.cummax(axes[0]).values


def packet(node: Node) -> Any:
    """Return the operator of a node, whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def depending(graph: torch.fx.Graph, on: Iterable[Node]) -> set[Node]:
    """Return some inputs of a graph, and the nodes whose numbers depend on theirs."""
    found = set(on)
    for node in graph.nodes:
        reads = node.op == "call_function" and packet(node) not in SHAPE_ALONE
        if reads and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def inputs_of(node: Node) -> list[Node]:
    """Return the nodes that a node reads, in the order of its arguments, with repetitions."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: found.append(argument))
    return found


class Values:
    """The nodes of a graph by what they depend on, and their values for an example.

    Args:
        capture: the graph.

    Attributes:
        kind: of each node: "const", "size" of an axis, "length" for what depends on numbers of
            rows and tokens alone, "data" for what depends on the tokens.
        of: value of each node for the example of the capture.
        varied: other values for nodes with one number for all tokens of the example, and for nodes
            that read these: a mask that is equal everywhere does not show what an operator does.
        counts: numbers of rows and tokens of the example.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture, self.max_positions = capture, capture.max_positions
        self.graph, self.input, self.out = capture.graph, capture.input, capture.output
        self.constants = capture.constants
        self.end = next(node for node in self.graph.nodes if node.op == "output")
        self.nodes = [
            node
            for node in self.graph.nodes
            if node.op != "output" and node.meta.get("val") is not None
        ]
        self.kind: dict[Node, str] = {}
        for node in self.nodes:
            self.kind[node] = self._kind(node)
        self.read = self._read()
        rows, length = capture.example.shape[:2]
        self.counts: Counts = {"B": rows, "Q": length, "K": length, "D": length}
        self.memory: set[Node] = set()  # nodes that depend on outputs of an encoder alone
        self.beside = capture.drawn(rows, length) if capture.memory else ()
        if self.beside:
            self.counts["M"] = self.beside[0].shape[1]
            self.memory |= self._of_memory_alone()
        self.of = self.evaluate()
        self.varied = self._varied()
        self._at_length: dict[int, dict[Node, Any]] = {}
        placed = {capture.positions: capture.axes > 0} if capture.positions else {}
        self._of_coordinates: dict[Node, bool] = {**placed}

    def _kind(self, node: Node) -> str:
        if node in self.constants:
            return "const"
        if node is self.input or node in self.capture.memory:
            return "data"
        if node is self.capture.positions or packet(node) in LIKE:
            return "length"
        read = {self.kind.get(other) for other in node.all_input_nodes}
        if not isinstance(node.meta["val"], (Tensor, tuple, list)):
            if node.target is not aten.sym_size.int and "data" in read:
                refuse(node, "makes a number of the data: control flow depends on it")
            return "size"
        if "data" in read:
            return "data"
        return "length" if read & {"size", "length"} else "const"

    def _read(self) -> set[Node]:
        """Return the nodes whose numbers, and not only shapes, the output depends on."""
        found: set[Node] = set()
        left = [self.out]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += () if packet(node) in LIKE else inputs_of(node)
        return found

    def _of_memory_alone(self) -> set[Node]:
        """Return the nodes of data that depend on outputs of an encoder, and no other data."""
        found = {self.capture.memory[0]}
        for node in self.nodes:
            above = self.data_of(node)
            if self.kind[node] == "data" and above and found.issuperset(above):
                found.add(node)
        return found

    def data_of(self, node: Node) -> list[Node]:
        """Return the inputs of a node that depend on the tokens."""
        return [other for other in inputs_of(node) if self.kind[other] == "data"]

    def size(self, of: Any, counts: Counts, role: str = "Q") -> Any:
        """Return a size, a node or an entry of a shape, for numbers of rows and tokens.

        role: "K" if the axis runs over keys.
        """
        value = of.meta["val"] if isinstance(of, Node) else of
        expression = value.node.expr if hasattr(value, "node") else value
        count = counts.get("keys", counts["K"]) if role == "K" else counts["Q"]
        if expression == self.capture.tokens:
            return count
        if expression == self.capture.rows:
            return counts["B"]
        if expression == self.capture.sources:
            return counts.get("M", self.counts["M"])
        if not isinstance(expression, sympy.Basic):
            return expression
        numbers = {self.capture.rows: counts["B"], self.capture.tokens: count}
        number = sympy_interp(PythonReferenceAnalysis, numbers, expression)
        whole = isinstance(value, torch.SymInt) and isinstance(number, (int, float, sympy.Integer))
        if isinstance(number, sympy.Number):
            return int(number) if whole else float(number)
        return int(number) if whole else number

    def call(
        self,
        node: Node,
        values: Sequence[Any],
        counts: Counts,
        role: str = "Q",
        roles: Roles | None = None,
    ) -> Any:
        """Run the operator of a node.

        Args:
            values: of its inputs, in order; values of sizes are ignored.
            counts: numbers of rows and tokens.
            role: "K" if its sizes run over keys.
            roles: of the output, for operators that take its shape.
        """
        left = iter(values)

        def value(argument: Node) -> Any:
            given = next(left)
            return self.size(argument, counts, role) if self.kind[argument] == "size" else given

        arguments: Any = torch.fx.node.map_arg(node.args, value)
        named: Any = torch.fx.node.map_arg(node.kwargs, value)
        operator: Any = node.target
        if operator is zero_scores:
            return zero_scores([self.size(size, counts) for size in node.meta["val"].shape])
        if roles is not None and packet(node) in SHAPED:
            place = SHAPED[packet(node)]
            sizes = shape_of(roles, counts)
            if place == 0:  # a new tensor gets size 1 for an open number of keys, to broadcast
                sizes = [1 if isinstance(size, int) and size < 0 else size for size in sizes]
            arguments = [*arguments[:place], sizes, *arguments[place + 1 :]]
        return operator(*arguments, **named)

    def evaluate(self, changed: Callable[[Node, Any], Any] = lambda _, x: x) -> dict[Node, Any]:
        """Return the values of all nodes for the example. changed: maps a node and its value to the
        one that is stored, and that later nodes read.
        """
        values: dict[Node, Any] = {**self.constants, self.input: self.capture.example}
        values |= zip(self.capture.memory, self.beside, strict=True)
        self._place(values, self.counts["B"], self.counts["Q"])
        with torch.no_grad():
            for node in self.nodes:
                if node not in values and self.kind[node] != "size":
                    read = [values.get(other) for other in inputs_of(node)]
                    values[node] = changed(node, self.call(node, read, self.counts))
        return values

    def _varied(self) -> dict[Node, Any]:
        found: dict[Node, Any] = {}
        generator = torch.Generator().manual_seed(6)
        for node in self.nodes:
            x, read = self.of.get(node), inputs_of(node)
            if self.kind[node] != "data" or not read:
                continue
            if not found.keys().isdisjoint(read):
                inputs = [found.get(other, self.of.get(other)) for other in read]
                x = found[node] = self.call(node, inputs, self.counts)
            if isinstance(x, Tensor) and x.numel() > 1 and bool((x == x.flatten()[0]).all()):
                if x.dtype == torch.bool:
                    found[node] = torch.rand(x.shape, generator=generator) < 0.5
                elif x.is_floating_point():
                    found[node] = torch.randn(x.shape, generator=generator).to(x.dtype)
        return found

    def _place(self, values: dict[Node, Any], rows: int, length: int) -> None:
        """Add the value of the input of positions, if the module has this input."""
        node = self.capture.positions
        if node is not None:
            values[node] = self.capture.module.counted(rows, length)

    def reads_coordinates(self, node: Node) -> bool:
        """Return whether a value that depends on no token depends on coordinates."""
        if node not in self._of_coordinates:
            reads = self.kind[node] == "length" and packet(node) not in LIKE
            inner = inputs_of(node) if reads else ()
            self._of_coordinates[node] = any(map(self.reads_coordinates, inner))
        return self._of_coordinates[node]

    def at(self, node: Node, length: int, known: dict[Node, Any] | None = None) -> Any:
        """Return a value that depends on the length alone, for one row of `length` tokens. known:
        values of other nodes, by default those for positions from 0 on; gets the computed values.
        Refused: an operator fails, as for a table with fewer positions.
        """
        if self.kind[node] == "const" and node in self.constants:
            return self.constants[node]
        known = self._at_length.setdefault(length, {}) if known is None else known
        if node in known:
            return known[node]
        counts: Counts = {"B": 1, "Q": length, "K": length}

        def value(other: Node) -> Any:
            if self.kind[other] == "size":
                return None
            if self.kind[other] == "data":  # only its shape is read
                shape = [self.size(size, counts) for size in other.meta["val"].shape]
                return torch.zeros(shape, dtype=other.meta["val"].dtype)
            return self.at(other, length, known)

        if node is self.capture.positions:
            self._place(known, 1, length)
        else:
            inputs = [value(other) for other in inputs_of(node)]
            try:
                known[node] = self.call(node, inputs, counts)
            except (RuntimeError, IndexError) as error:
                said = str(error).partition("\n")[0]
                refuse(node, f"cannot be computed for {length} positions: {said}")
        return known[node]

    def forget(self) -> None:
        """Release the values of `at`, which are only needed while steps are found."""
        self._at_length.clear()
