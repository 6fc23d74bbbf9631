"""One module from traces of fixed sizes, for code that makes plain numbers of the sizes."""

import itertools
import operator
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from posenc_export.reading.values import LIKE

aten = torch.ops.aten
Sizes = Sequence[Tuple[int, int]]  # rows and tokens of each trace


class _Numbers(TorchDispatchMode):
    """Notes the plain numbers that code makes of tensors, and whether one depends on x."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.of_data: Dict[int, Tensor] = {id(x): x}  # which lives as long as its id counts
        self.found: List[Any] = []
        self.depends = False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        read = any(id(value) in self.of_data for value in pytree.tree_leaves((args, kwargs)))
        if operator is aten._local_scalar_dense.default:
            self.found.append(result)
            self.depends |= read
        elif read and operator.overloadpacket not in LIKE:
            made = (t for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
            self.of_data.update({id(t): t for t in made})
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
        for name, kind in (
            ("item", None),
            ("__int__", int),
            ("__float__", float),
            ("__bool__", bool),
        ):

            def number(x: Tensor, kind: Any = kind) -> Any:
                value = next(left)
                return value if kind is None else kind(value)

            if numbers.found and not numbers.depends:
                stack.enter_context(mock.patch.object(Tensor, name, number))
        yield


class Joined(nn.Module):
    """A module from x, and positions, whose numbers are those of several traces, for any sizes.

    Args:
        programs: traces at fixed sizes, whose graphs differ in whole numbers alone.
        sizes: of the traces, four or more.

    Raises:
        ValueError: they differ otherwise.
    """

    def __init__(self, programs: Sequence[ExportedProgram], sizes: Sizes) -> None:
        super().__init__()
        first, graph = programs[0], Graph()
        held = [_held(program) for program in programs]
        nodes = [list(program.graph.nodes) for program in programs]
        if len({len(each) for each in nodes}) > 1 or any(held[0].keys() != h.keys() for h in held):
            raise ValueError("traces differ in their operators")
        places = [{n: i for i, n in enumerate(each)} for each in nodes]
        inputs = [n for n in nodes[0] if n.op == "placeholder" and n.name not in held[0]]
        known = {node: graph.placeholder(node.name) for node in inputs}
        given = list(known.values())
        for node, *others in zip(*nodes, strict=True):
            if node in known:
                continue
            if node.op == "placeholder":
                tables = [own[node.name] for own in held]
                if all(_equal(table, tables[0]) for table in tables):
                    known[node] = graph.get_attr(_attribute(node.name, first))
                    continue
                if any(table.dim() or table != table.to(torch.int64) for table in tables):
                    raise ValueError("traces hold different tables")
                number = _number([int(table) for table in tables], sizes, graph, given)
                known[node] = graph.call_function(
                    aten.full.default, ([], number), {"dtype": tables[0].dtype}
                )
            elif node.op == "output":
                graph.output(known[node.args[0][0]])
            else:
                if any(other.target is not node.target for other in others):
                    raise ValueError("traces differ in their operators")
                args = _joined([node, *others], places, sizes, graph, given, known)
                known[node] = graph.call_function(node.target, *args)
            if node in known:
                kept = ("stack_trace", "nn_module_stack")
                known[node].meta = {key: node.meta[key] for key in kept if key in node.meta}
        root = {_attribute(name, first): value for name, value in held[0].items()}
        self.module = GraphModule(root, graph)

    def forward(self, x: Tensor, positions: Optional[Tensor] = None) -> Tensor:
        inputs = (x,) if positions is None else (x, positions)
        with torch.fx.traceback.preserve_node_meta():
            result: Tensor = Interpreter(self.module).run(*inputs)
        return result


def _held(program: ExportedProgram) -> Dict[str, Tensor]:
    """Weights and tables of a trace, by the names of their placeholders."""
    signature = program.graph_signature
    state = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = signature.inputs_to_lifted_tensor_constants
    found = {}
    for name, own in {**state, **lifted}.items():
        stored = program.state_dict.get(own)
        found[name] = program.constants[own] if stored is None else stored
    return found


def _attribute(name: str, program: ExportedProgram) -> str:
    """The name of a weight within the module, or that of the placeholder of a table."""
    signature = program.graph_signature
    state = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return state.get(name, name).removeprefix("module.")


def _equal(a: Optional[Tensor], b: Tensor) -> bool:
    return a is b or a is not None and a.shape == b.shape and torch.equal(a, b)


def _joined(
    nodes: Sequence[Node],
    places: Sequence[Dict[Node, int]],
    sizes: Sizes,
    graph: Graph,
    given: Sequence[Node],
    known: Dict[Node, Node],
) -> Tuple[Any, Any]:
    """Arguments of the same node of all traces, with numbers that follow the sizes computed."""
    flat = [
        pytree.tree_flatten((node.args, node.kwargs), is_leaf=lambda a: a is None) for node in nodes
    ]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("traces differ in their arguments")
    leaves = []
    for values in zip(*(own for own, _ in flat), strict=True):
        first = values[0]
        if isinstance(first, Node):
            if len({place[value] for place, value in zip(places, values, strict=True)}) > 1:
                raise ValueError("traces differ in their order")
            leaves.append(known[first])
        elif all(type(value) is type(first) and value == first for value in values):
            leaves.append(first)
        else:
            leaves.append(_number(values, sizes, graph, given))
    args, kwargs = pytree.tree_unflatten(leaves, flat[0][1])
    return args, kwargs


def _number(values: Sequence[Any], sizes: Sizes, graph: Graph, given: Sequence[Node]) -> Node:
    """Compute a number that is p times a product of sizes plus q, for whole p and q."""
    if not all(type(value) is int for value in values):
        raise ValueError(f"traces differ in {values}")
    for powers in sorted(itertools.product((0, 1), (0, 1, 2)), key=sum):
        units = [rows ** powers[0] * length ** powers[1] for rows, length in sizes]
        if units[0] == units[1]:
            continue
        p = (values[1] - values[0]) // (units[1] - units[0])
        q = values[0] - p * units[0]
        if all(p * unit + q == value for unit, value in zip(units, values, strict=True)):
            number: Any = p
            for axis, power in enumerate(powers):
                for _ in range(power):
                    size = graph.call_function(aten.sym_size.int, (given[0], axis))
                    number = graph.call_function(operator.mul, (number, size))
            return graph.call_function(operator.add, (number, q))
    raise ValueError(f"a number is none of the sizes: {values}")
