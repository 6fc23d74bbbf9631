"""One module from traces of fixed sizes, for code that makes plain numbers of the sizes."""

import itertools
import operator
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from posenc_export.reading.values import LIKE
from posenc_export.reading.whole import held_by

aten = torch.ops.aten
NUMBERS = (("item", lambda n: n), ("__int__", int), ("__float__", float), ("__bool__", bool))
KEPT = ("stack_trace", "nn_module_stack")  # of what is known of a node


class _Numbers(TorchDispatchMode):
    """Notes the plain numbers that code makes of tensors, and whether one depends on x."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.of_data = {id(x): x}  # which lives as long as its id counts
        self.found: List[Any] = []
        self.depends = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        read = any(id(value) in self.of_data for value in pytree.tree_leaves((args, kwargs)))
        if op is aten._local_scalar_dense.default:
            self.found.append(result)
            self.depends |= read
        elif read and op.overloadpacket not in LIKE:
            self.of_data.update({id(t): t for t in pytree.tree_leaves(result)})
        return result


@contextmanager
def numbers_of_lengths(module: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Iterator[None]:
    """Within a trace of these inputs, `int(tensor)` and the like give what they gave in a call,
    unless one depends on the first input.
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
        graph: takes its inputs, weights and tables.
        names: of weights and tables in the module, by their names in the graph.
        held: weights and tables by these names.
        root: has the attributes of the graph.
        outputs: how many are read.
    """

    graph: Graph
    names: Dict[str, str]
    held: Dict[str, Tensor]
    root: Optional[nn.Module] = None
    outputs: int = 1


class Joined(nn.Module):
    """A module from x, and positions, that gives the numbers of several traces, for any sizes.

    Args:
        traces: at fixed sizes, whose graphs differ in whole numbers alone.
        sizes: rows and tokens of each; three or more.
        axes: the input and the axis that have the rows, and those that have the tokens.

    Raises:
        ValueError: they differ otherwise.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        sizes: Sequence[Tuple[int, int]],
        axes: Sequence[Tuple[int, int]] = ((0, 0), (0, 1)),
    ) -> None:
        super().__init__()
        self.sizes, self.axes, self.graph = sizes, axes, Graph()
        self.weights: List[Tensor] = []  # parameters of the roots, which are the last inputs
        nodes = [list(trace.graph.nodes) for trace in traces]
        if len({str([(n.op, n.target) for n in each if n.op[0] == "c"]) for each in nodes}) > 1:
            raise ValueError("traces differ in their operators")
        places = [{node: place for place, node in enumerate(each)} for each in nodes]
        names, held = traces[0].names, [trace.held for trace in traces]
        inputs = [n for n in nodes[0] if n.op == "placeholder" and n.name not in names]
        known = {node: self.graph.placeholder(node.name) for node in inputs}
        self.given, root = list(known.values()), {}
        for alike in zip(*nodes, strict=True):
            node = alike[0]
            if node.op == "placeholder" and node in known:
                continue
            if node.op == "placeholder":
                tables = [own[node.name] for own in held]
                root[names[node.name]] = tables[0]
                known[node] = self.graph.get_attr(names[node.name])
                if not _equal(tables):
                    number = self._number([table.item() for table in tables])
                    like: Any = {"dtype": tables[0].dtype}
                    known[node] = self.graph.call_function(aten.full.default, ([], number), like)
                continue
            if node.op == "get_attr":
                tables = [getattr(t.root, n.target) for t, n in zip(traces, alike, strict=True)]
                if not _equal(tables):
                    raise ValueError("traces have tables of their own")
                if isinstance(tables[0], nn.Parameter):
                    known[node] = self.graph.placeholder(node.name)
                    self.weights.append(tables[0])
                    continue
                root[node.target] = tables[0]
                known[node] = self.graph.get_attr(node.target)
                continue
            flat = [pytree.tree_flatten((node.args, node.kwargs)) for node in alike]
            if any(spec != flat[0][1] for _, spec in flat):
                raise ValueError("traces differ in their arguments")
            leaves: List[Any] = []
            for values in zip(*(own for own, _ in flat), strict=True):
                if not isinstance(values[0], Node):
                    leaves.append(self._number(values))
                elif len({of[value] for of, value in zip(places, values, strict=True)}) > 1:
                    raise ValueError("traces differ in their order")
                else:
                    leaves.append(known[values[0]])
            args, kwargs = pytree.tree_unflatten(leaves, flat[0][1])
            if node.op == "output":
                self.graph.output(list(args[0])[: traces[0].outputs])
            else:
                known[node] = self.graph.call_function(node.target, args, kwargs)
                known[node].meta = {key: node.meta[key] for key in KEPT if key in node.meta}
        self.module = GraphModule(root, self.graph)

    def forward(self, x: Tensor, positions: Optional[Tensor] = None) -> Tensor:
        return self.all((x,) if positions is None else (x, positions))[0]

    def all(self, inputs: Sequence[Tensor]) -> List[Tensor]:
        """Return all outputs. inputs: those of the traces, then `weights`."""
        with torch.fx.traceback.preserve_node_meta():
            results: List[Tensor] = Interpreter(self.module).run(*inputs)
        return results

    def _number(self, values: Sequence[Any]) -> Any:
        """Return what all traces have, or compute p times a product of sizes plus q."""
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
                for of in (0,) * powers[0] + (1,) * powers[1]:
                    place, axis = self.axes[of]
                    size = self.graph.call_function(aten.sym_size.int, (self.given[place], axis))
                    number = self.graph.call_function(operator.mul, (number, size))
                return self.graph.call_function(operator.add, (number, int(q)))
        raise ValueError(f"a number is none of the sizes: {values}")


def _equal(tables: Sequence[Tensor]) -> bool:
    """Return whether all tensors are equal."""
    return all(torch.equal(table, tables[0]) for table in tables)


def trace_of(program: ExportedProgram) -> Trace:
    """Return the trace of a program."""
    held = held_by(program)
    names = {node: name.removeprefix("module.") for node, (name, _) in held.items()}
    return Trace(program.graph, names, {node: value for node, (_, value) in held.items()})
