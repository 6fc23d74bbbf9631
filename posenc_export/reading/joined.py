"""One module from traces of fixed sizes, for code that makes plain numbers of the sizes."""

import itertools
import operator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple, Sequence
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from posenc_export.reading.values import LIKE
from posenc_export.reading.whole import OneTensor
from posenc_export.reading.writes import without_writes

aten = torch.ops.aten
NUMBERS = (("item", lambda n: n), ("__int__", int), ("__float__", float), ("__bool__", bool))
KEPT = ("stack_trace", "nn_module_stack")  # of what is known of a node


class _Numbers(TorchDispatchMode):
    """Records the Python numbers that code takes from tensors, and whether one depends on x."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.of_data = {id(x): x}  # which lives as long as its id counts
        self.found: list[Any] = []
        self.depends = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, leaves = op(*args, **(kwargs or {})), pytree.tree_leaves((args, kwargs))
        read = any(id(value) in self.of_data for value in leaves)
        if read and torch.Tag.dynamic_output_shape in op.tags:
            masks = [t for t in leaves if isinstance(t, Tensor) and t.dtype == torch.bool]
            if op.overloadpacket is not aten.index or masks:
                raise ValueError("a data-dependent size")
        if op is aten._local_scalar_dense.default:
            self.found.append(result)
            self.depends |= read
        elif read and op.overloadpacket not in LIKE:
            self.of_data.update({id(t): t for t in pytree.tree_leaves(result)})
        return result


@contextmanager
def numbers_of_lengths(module: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Iterator[None]:
    """Let `int(tensor)` and the like return in a trace of these inputs what they return in a call,
    unless one depends on the first input. ValueError: a size depends on it.
    """
    with torch.no_grad(), _Numbers(inputs[0]) as numbers:
        module(*inputs)
    left = iter(numbers.found)
    with ExitStack() as stack:
        for name, kind in NUMBERS if numbers.found and not numbers.depends else ():
            given = mock.patch.object(Tensor, name, lambda _, kind=kind: kind(next(left)))
            stack.enter_context(given)
        yield


class Trace(NamedTuple):
    """A trace at fixed sizes.

    Attributes:
        graph: takes the inputs, and reads weights and tables as attributes.
        names: of weights and tables in the module, by their names in the graph.
        held: weights and tables by their names in the graph.
    """

    graph: Graph
    names: dict[str, str]
    held: dict[str, Tensor]


@contextmanager
def _with_layers(plain: OneTensor) -> Iterator[None]:
    """Within the context, nodes of a trace have the names of the layers around them."""
    stack: dict[str, tuple[str, type]] = {}

    def noted(name: str, begins: bool, layer: nn.Module, *_: Any) -> None:
        stack.pop(name, None)
        stack.update({name: (name, type(layer))} if begins else {})
        torch.fx.traceback.get_current_meta()["nn_module_stack"] = dict(stack)

    for name, layer in plain.named_modules():
        layer.register_forward_pre_hook(partial(noted, name, True))
        layer.register_forward_hook(partial(noted, name, False))
    with torch.fx.traceback.preserve_node_meta():
        yield


def traced_at(plain: OneTensor, inputs: tuple[Tensor, ...]) -> Trace:
    """Trace a module for inputs of fixed sizes. ValueError: it writes into values of others."""
    copied = plain.copied()
    with ExitStack() as stack:
        stack.enter_context(numbers_of_lengths(plain.copied(), inputs))
        stack.enter_context(_with_layers(copied))
        # Values of nodes are not needed, and take most of the time of a trace.
        without = mock.patch.object(proxy_tensor, "extract_val", lambda value, **_: None)
        stack.enter_context(without)
        traced = make_fx(copied, pre_dispatch=True, record_stack_traces=True)(*inputs)
    traced.graph.eliminate_dead_code()
    if not without_writes(traced.graph):
        raise ValueError("a trace writes into its values")
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "get_attr"]
    held = {target: getattr(traced, target) for target in targets}
    own = {id(value): name for name, value in copied.tensors().items()}
    names = {target: own.get(id(value), target) for target, value in held.items()}
    return Trace(traced.graph, names, held)


class Joined(nn.Module):
    """A module of x and positions for any sizes, joined from traces at fixed sizes.

    Args:
        traces: three or more, whose graphs differ in whole numbers alone.
        sizes: rows and tokens of each trace.

    Raises:
        ValueError: the graphs differ in something else.
    """

    def __init__(self, traces: Sequence[Trace], sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.module = _Union(traces, sizes).module

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        inputs = (x,) if positions is None else (x, positions)
        with torch.fx.traceback.preserve_node_meta():
            result: Tensor = Interpreter(self.module).run(*inputs)
        return result


class _Union:
    """The graph of Joined, as `module`."""

    def __init__(self, traces: Sequence[Trace], sizes: Sequence[tuple[int, int]]) -> None:
        self.traces, self.sizes, self.graph = traces, sizes, Graph()
        nodes = [list(trace.graph.nodes) for trace in traces]
        if len({str([(n.op, n.target) for n in each if n.op[0] == "c"]) for each in nodes}) > 1:
            raise ValueError("traces differ in their operators")
        self.places = [{node: place for place, node in enumerate(each)} for each in nodes]
        self.known: dict[Node, Any] = {}
        self.root: dict[str, Tensor] = {}
        for alike in zip(*nodes, strict=True):
            node = alike[0]
            if node.op == "placeholder":
                self.known[node] = self.graph.placeholder(node.name)
            elif node.op == "get_attr":
                self.known[node] = self._table(alike)
            else:
                self._add(alike)
        self.module = GraphModule(self.root, self.graph)

    def _table(self, alike: Sequence[Node]) -> Node:
        """Read a table that all traces have, or compute a number."""
        tables = [own.held[str(n.target)] for own, n in zip(self.traces, alike, strict=True)]
        if all(torch.equal(table, tables[0]) for table in tables):
            name = self.traces[0].names[str(alike[0].target)]
            self.root[name] = tables[0]
            return self.graph.get_attr(name)
        number = self._number([table.item() for table in tables])
        like: Any = {"dtype": tables[0].dtype}
        return self.graph.call_function(aten.full.default, ([], number), like)

    def _add(self, alike: Sequence[Any]) -> None:
        """Add an operator that all traces have, with arguments joined by `_number`."""
        node, flat = alike[0], [pytree.tree_flatten((n.args, n.kwargs)) for n in alike]
        if any(spec != flat[0][1] for _, spec in flat):
            raise ValueError("traces differ in their arguments")
        leaves: list[Any] = []
        for values in zip(*(own for own, _ in flat), strict=True):
            if not isinstance(values[0], Node):
                leaves.append(self._number(values))
            elif len({of[value] for of, value in zip(self.places, values, strict=True)}) > 1:
                raise ValueError("traces differ in their order")
            else:
                leaves.append(self.known[values[0]])
        args, kwargs = pytree.tree_unflatten(leaves, flat[0][1])
        if node.op == "output":
            self.graph.output(args[0])
        else:
            self.known[node] = self.graph.call_function(node.target, args, kwargs)
            self.known[node].meta = {key: node.meta[key] for key in KEPT if key in node.meta}

    def _number(self, values: Sequence[Any]) -> Any:
        """Return the value that all traces have, or a node p * (product of sizes) + q."""
        if all(type(value) is type(values[0]) and value == values[0] for value in values):
            return values[0]
        for powers in itertools.product((0, 1), (0, 1, 2)):
            units = [rows ** powers[0] * length ** powers[1] for rows, length in self.sizes]
            if powers == (0, 0) or not all(value == int(value) for value in values):
                continue
            p = (values[1] - values[0]) // (units[1] - units[0])
            q = values[0] - p * units[0]
            if all(p * unit + q == value for unit, value in zip(units, values, strict=True)):
                number: Any = int(p)
                x = next(iter(self.graph.nodes))
                for axis in (0,) * powers[0] + (1,) * powers[1]:
                    size = self.graph.call_function(aten.sym_size.int, (x, axis))
                    number = self.graph.call_function(operator.mul, (number, size))
                return self.graph.call_function(operator.add, (number, int(q)))
        raise ValueError(f"a number is none of the sizes: {values}")
