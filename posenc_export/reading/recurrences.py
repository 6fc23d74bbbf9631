"""Functions that a module calls to run a recurrence, found in one call and proved by numbers.

A loop over tokens or chunks, or a closed form of one, takes values apart that have an axis of
tokens and joins others that have one again. Where the numbers between are those of the gated
linear recurrence S = e^g S + r k (v - S^T k)^T or S = e^g S + k v^T, y = S^T q, a trace of the
function has one operation in their place.
"""

import dataclasses
import functools
import gc
import itertools
import math
import sys
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import CodeType, FrameType, FunctionType
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)
from unittest import mock

import torch
from torch import Tensor, library
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from posenc_export.ops.recurrence import gated_delta
from posenc_export.reading.exact import Exact, widened
from posenc_export.reading.joined import Joined, Trace
from posenc_export.reading.refused import NOT_THE_PERSONS
from posenc_export.reading.values import LAYOUT, LIKE, packet
from posenc_export.reading.whole import OneTensor, of_length

aten = torch.ops.aten
LIBRARY = "posenc_recurrence"
library.define(
    f"{LIBRARY}::run",
    "(Tensor? q, Tensor k, Tensor? v, Tensor? decay, Tensor? rate) -> Tensor",
)
RUN = torch.ops.posenc_recurrence.run.default
ROWS, LENGTHS = (3, 5, 11, 47, 53), (7, 9, 13, 17, 19, 23, 29, 31, 37)  # of the calls to trace
TRACES = 3  # of a function, which show how numbers in it depend on rows and tokens
PROVED = (1, 2, 33, 64, 65, 130)  # tokens for which a function is called again
LONGEST = 1024  # whole numbers among its arguments may be sizes of chunks
NEAR = 1e-9  # of the largest number, in float64
MOST_ENTRIES = 6  # of a group, of which each order is tried
LEAST = 1e-37  # of a factor that is taken as a logarithm
# Operators without branches and bounds: a group of them that is a recurrence at random numbers is
# one at all numbers.
SMOOTH = set(
    """add sub rsub mul neg div exp matmul mm bmm baddbmm addmm linear einsum sum cumsum tril triu
    masked_fill where constant_pad_nd pad cat stack select slice narrow split split_with_sizes chunk
    unbind select_scatter slice_scatter copy to _to_copy float movedim swapaxes getitem
    linalg_solve_triangular""".split()
) | {operator.__name__ for operator in LAYOUT}
ROLES = ("q", "k", "v", "decay", "rate")
FAILED = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError)
Stand = Callable[..., Any]
_called: Dict[int, Stand] = {}  # by number of a function whose calls are taken over
_numbers = itertools.count()


def operands(
    q: Any, k: Any, v: Any, decay: Any, rate: Any
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Optional[Tensor]]:
    """Return the arguments of ops.gated_delta from tensors or None: queries and
    values that are not given are 1, and without decays nothing is forgotten.
    """
    heads = k.shape[2] if v is None else v.shape[2]
    ones = torch.ones((), dtype=k.dtype)
    q = ones.expand(k.shape) if q is None else q
    v = ones.expand(*k.shape[:2], heads, 1) if v is None else v
    return q, k, v, torch.zeros_like(v[..., 0]) if decay is None else decay, rate


def run(*given: Any) -> Tensor:
    """Run a recurrence over whole sequences; arguments as those of `operands`."""
    q, k, v, decay, rate = operands(*given)
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    return gated_delta(q, k, v, decay, rate, state)[0].contiguous()


library.impl(f"{LIBRARY}::run", "CompositeExplicitAutograd", run)


@library.register_fake(f"{LIBRARY}::run")
def _(*given: Any) -> Tensor:
    v = operands(*given)[2]
    return torch.empty(v.shape, dtype=v.dtype)


# Where a module runs a recurrence


class _Watch(TorchFunctionMode):
    """Notes groups of values of a call that have no axis of tokens, but were computed from values
    that have one, and the values with such an axis that are computed from a group.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.rows, self.tokens = x.shape[:2]
        self.known: Dict[int, Tensor] = {id(x): x}  # which live as long as their ids count
        self.group: Dict[int, int] = {}  # of values without tokens
        self.frames: Dict[int, List[FrameType]] = {}  # that all of a group have in common
        self.ends: Dict[int, List[FrameType]] = {}  # of groups that gave a value with tokens
        self.count = itertools.count()

    def __torch_function__(self, of: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = of(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        read = [x for x in leaves if isinstance(x, Tensor) and id(x) in self.known]
        made = pytree.tree_leaves(result if result is not None else args[:1])
        for y in [y for y in made if read and isinstance(y, Tensor)]:
            self.known[id(y)] = y
            inside = [self.group[id(x)] for x in read if id(x) in self.group and x is not y]
            every = self.rows * self.tokens
            has_tokens = any(size == self.tokens or size and size % every == 0 for size in y.shape)
            if has_tokens and not inside:
                continue
            joined, stack = min(inside, default=next(self.count)), self._stack()
            for other in {joined, *inside}:
                own = self.frames.get(other, stack)
                stack = [a for a, b in zip(stack, own, strict=False) if a is b]
            if len(set(inside)) > 1:
                self.group = {i: joined if g in inside else g for i, g in self.group.items()}
                for other in set(inside) & self.ends.keys():
                    del self.ends[other]
            self.frames[joined] = stack
            if has_tokens:
                self.ends[joined] = stack
            else:
                self.group[id(y)] = joined
        return result

    def _stack(self) -> List[FrameType]:
        frame, found = sys._getframe(2), []
        while frame is not None:
            if not frame.f_code.co_filename.startswith(NOT_THE_PERSONS):
                found.append(frame)
            frame = frame.f_back  # type: ignore[assignment]
        return found[::-1]

    def codes(self) -> List[CodeType]:
        """Return the code of the innermost functions around groups that end."""
        found = []
        for stack in self.ends.values():
            found += [f.f_code for f in stack if not f.f_code.co_name.startswith("<")][-1:]
        return list(dict.fromkeys(found))


@contextmanager
def _taken_over(code: CodeType, stand: Callable[[Stand], Stand]) -> Iterator[None]:
    """Let calls of the functions with some code call stand(function) instead."""
    functions = _functions(code)
    numbers = []
    for function in functions:
        own = FunctionType(
            code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
        )
        own.__kwdefaults__ = function.__kwdefaults__
        numbers.append(next(_numbers))
        _called[numbers[-1]] = stand(own)
        free = ", ".join(code.co_freevars)  # the closure of a function stays as it is
        text = [f"def outer({free}):", " def taken(*a, **k):", f"  if 0: ({free})"]
        text += [f"  return calls[{numbers[-1]}](*a, **k)", " return taken"]
        taken = _compiled(
            "\n".join(text).replace("calls", f"__import__('sys').modules[{__name__!r}]._called")
        )
        function.__code__ = taken.replace(co_name=code.co_name)
    try:
        yield
    finally:
        for function, number in zip(functions, numbers, strict=True):
            function.__code__ = code
            del _called[number]


def _functions(code: CodeType) -> List[FunctionType]:
    """Return the functions with some code, those that gc.freeze() hides from searches too."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    functions = [f for f in gc.get_referrers(code) if isinstance(f, FunctionType)]
    if frozen:
        gc.freeze()
    return functions


def _compiled(text: str) -> CodeType:
    """Return the code of the function inside a function that a text defines."""
    codes = [compile(text, "<posenc>", "exec")]
    for _ in range(2):
        codes = [c for c in codes[0].co_consts if isinstance(c, CodeType)]
    return codes[0]


@dataclasses.dataclass
class Recurrences:
    """The recurrences of a module, in the order of their calls by code; None for other calls."""

    stands: Dict[CodeType, List[Optional["Function"]]]

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Within the context, recurrences are one operation each."""
        with ExitStack() as stack:
            for code, found in self.stands.items():
                turns = itertools.cycle(found)

                def stand(own: Stand, turns: Any = turns) -> Stand:
                    def called(*args: Any, **kwargs: Any) -> Any:
                        turn = next(turns)
                        return own(*args, **kwargs) if turn is None else turn(args, kwargs)

                    return called

                stack.enter_context(_taken_over(code, stand))
            yield

    @property
    def phrases(self) -> List[str]:
        """Say which functions are recurrences."""
        names = sorted({code.co_name for code, found in self.stands.items() if any(found)})
        return [f"{name} as one operation with a state" for name in names]


def recurrences(plain: OneTensor, x: Tensor, most: int) -> Recurrences:
    """Find the recurrences that a module runs. x: [B,S] or [B,S,E]; most: tokens that it takes."""
    taken = {s for held in plain.state_dict().values() for s in held.shape} | set(x.shape[2:])
    free = ([n for n in all_of if n not in taken and n <= most] for all_of in (ROWS, LENGTHS))
    sizes = list(zip(*free, strict=False))[:TRACES]
    if len(sizes) < TRACES:
        return Recurrences({})
    x = of_length(x[torch.arange(sizes[0][0]) % x.shape[0]], sizes[0][1]).clone()
    copied = plain.copied()
    watch = _Watch(x)
    try:
        with torch.no_grad(), watch:
            copied(*copied.inputs(x))
    except Exception:  # whatever forward raises; so few tokens are no promise
        return Recurrences({})
    stands: Dict[CodeType, List[Optional[Function]]] = {code: [] for code in watch.codes()}
    del watch  # which holds the values of the call
    if not stands:
        return Recurrences({})
    known: Dict[str, Optional[Function]] = {}
    with torch.no_grad(), ExitStack() as stack:
        for code, found in stands.items():

            def stand(own: Stand, found: List[Optional[Function]] = found) -> Stand:
                def called(*args: Any, **kwargs: Any) -> Any:
                    leaves, spec = pytree.tree_flatten((args, kwargs))
                    key = str((id(own), spec, [_described(leaf) for leaf in leaves]))
                    if key not in known:
                        function = Function(own, leaves, spec, sizes)
                        known[key] = function if function.found else None
                    found.append(known[key])
                    return own(*args, **kwargs)

                return called

            stack.enter_context(_taken_over(code, stand))
        copied(*copied.inputs(x))
    return Recurrences({code: found for code, found in stands.items() if any(found)})


def _described(leaf: Any) -> str:
    """Say what an argument is, equal for arguments for which a function traces alike."""
    if isinstance(leaf, Tensor):
        return f"{leaf.shape} {leaf.dtype}"
    return f"{type(leaf)} {id(leaf)}" if isinstance(leaf, torch.nn.Module) else repr(leaf)


# A function, with its recurrence as one operation


class Function:
    """A function of tensors in which one operation stands for each recurrence.

    Args:
        own: the function.
        leaves, spec: the arguments of a call, flat.
        sizes: numbers of rows and of tokens, which no other sizes equal; the first are those
            of the call.

    Attributes:
        found: whether there is one, proved by numbers.
    """

    def __init__(
        self, own: Stand, leaves: List[Any], spec: Any, sizes: List[Tuple[int, int]]
    ) -> None:
        self.own, self.spec, self.found = own, spec, False
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        given = [leaves[place].detach() for place in self.places]
        axes = [_axes(t, *sizes[0]) for t in given]
        whole = [place for place, own in enumerate(axes) if own and None not in own]
        if not whole or any(own is None for own in axes):
            return
        self.draws, self.forms = _Draws(given, axes, sizes[0]), list[Form]()
        try:
            traces = [self._trace(self.draws(*size), size) for size in sizes]
            rows, tokens = axes[whole[0]]  # type: ignore[misc]
            self.module = Joined(traces, sizes, [(whole[0], rows), (whole[0], tokens)])  # type: ignore[list-item]
            self.weights = [self._place(leaves, weight) for weight in self.module.weights]
            chunks = [n for n in self.leaves if type(n) is int and 1 < n < LONGEST]
            lengths = sorted({*PROVED, *chunks, *(n + 1 for n in chunks)})
            self.found = all(self._is_same(1 + n % 2, n) for n in lengths)
        except FAILED:  # whatever a function raises that takes its arguments otherwise
            return

    def __call__(self, args: Any, kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        return self._result(self._standing([leaves[place] for place in self.places], leaves))

    def _standing(self, tensors: List[Tensor], leaves: Sequence[Any]) -> List[Tensor]:
        """Return the outputs with operations for the recurrences."""
        held = [attrgetter(name)(leaves[place]) for place, name in self.weights]
        return self.module.all([*tensors, *held])

    def _place(self, leaves: Sequence[Any], weight: Tensor) -> Tuple[int, str]:
        """Return the argument that holds a weight, and its name there. ValueError: none does."""
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.nn.Module):
                for name, own in leaf.named_parameters():
                    if own is weight:
                        return place, name
        raise ValueError("a weight that is no argument's")

    def _result(self, outputs: Sequence[Any]) -> Any:
        """Return the result of a call. What has no axis of tokens in it is not a number, so that
        nothing that reads it passes.
        """
        left, of_rows = iter(outputs), outputs[0].shape[self.rows_of]
        values = []
        for leaf, has_tokens in zip(self.result, self.kept, strict=True):
            if isinstance(leaf, Tensor) and not has_tokens:
                shape = [of_rows if size == self.rows else size for size in leaf.shape]
                leaf = outputs[0].new_full(shape, math.nan)
            values.append(next(left) if has_tokens else leaf)
        return pytree.tree_unflatten(values, self.result_spec)

    def _called(self, tensors: Sequence[Tensor]) -> List[Any]:
        """Call the function with other tensors. Return its result, flat."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        values, self.result_spec = pytree.tree_flatten(self.own(*args, **kwargs))
        return values

    def _trace(self, tensors: List[Tensor], size: Tuple[int, int]) -> Trace:
        """Return the trace of a call with recurrences as operations. ValueError: there is none."""
        with torch.no_grad():
            self.result, self.rows = self._called(tensors), size[0]
            self.kept = [isinstance(v, Tensor) and size[1] in v.shape for v in self.result]
            first = self.result[self.kept.index(True)]
            self.rows_of = list(first.shape).index(self.rows)

            def given(*tensors: Tensor) -> List[Tensor]:
                results = self._called(tensors)
                return [y for y, kept in zip(results, self.kept, strict=True) if kept]

            traced = _traced(given, tensors)
        traced.graph.eliminate_dead_code()
        self.forms = _Cut(traced, tensors, size, self.forms).found
        if not self.forms:
            raise ValueError("no recurrence")
        traced.graph.eliminate_dead_code()
        return Trace(traced.graph, {}, {}, traced, sum(self.kept))

    def _is_same(self, rows: int, length: int) -> bool:
        """Compare with the function in float64."""
        tensors = self.draws(rows, length)
        with torch.no_grad():
            results = self._called([Exact(widened(t), t.dtype) for t in tensors])
            wanted = [y for y, kept in zip(results, self.kept, strict=True) if kept]
            wide = [widened(t) for t in tensors]
            wide = [Exact(t, s.dtype) for t, s in zip(wide, tensors, strict=True)]
            got = self._standing(wide, self.leaves)
        pairs = [[getattr(y, "numbers", y) for y in pair] for pair in zip(got, wanted, strict=True)]
        return all(_near(a.double(), b.double()) for a, b in pairs)


def _traced(given: Stand, tensors: List[Tensor]) -> GraphModule:
    """Return the trace of a function as its code writes it; in operators without effects where it
    writes into its values.
    """
    # Values of nodes are not needed, and take most of the time of a trace.
    with mock.patch.object(proxy_tensor, "extract_val", lambda value, **_: None):
        traced = make_fx(given, pre_dispatch=True)(*tensors)
        if any(is_effect(node) for node in traced.graph.nodes):
            traced = make_fx(torch.func.functionalize(given, remove="mutations"))(*tensors)
    return traced


def is_effect(node: Node) -> bool:
    """Return whether an operator writes to an input."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Draws:
    """Tensors like those of a call, with other numbers of rows and tokens. Each number keeps its
    sign, and none is there twice.
    """

    def __init__(self, given: List[Tensor], axes: List[Any], counts: Tuple[int, int]) -> None:
        self.given, self.axes, self.counts = given, axes, counts
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, *sizes: int) -> List[Tensor]:
        """Return tensors for numbers of rows and tokens."""
        found = []
        for t, axes in zip(self.given, self.axes, strict=True):
            y = t
            for axis, count, size in zip(axes, self.counts, sizes, strict=True):
                if axis is not None:
                    index = torch.randint(count, (size,), generator=self.generator)
                    y = y.index_select(axis, index)
            if y.is_floating_point() and axes[1] is not None:
                y = y * (0.6 + 0.8 * torch.rand(y.shape, generator=self.generator)).to(y.dtype)
            found.append(y.contiguous())
        return found


def _axes(t: Tensor, rows: int, length: int) -> Optional[Tuple[Optional[int], Optional[int]]]:
    """Return the axes of rows and tokens, each None if there is none; None: one is there twice, or
    is part of another.
    """
    shape = list(t.shape)
    if shape.count(rows) > 1 or shape.count(length) > 1:
        return None
    if any(size % length == 0 and size > length for size in shape):
        return None
    found = [shape.index(size) if size in shape else None for size in (rows, length)]
    return found[0], found[1]


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not bool(b.isfinite().all()):
        return False
    largest = max(float(b.abs().max()), 1e-12) if b.numel() else 1.0
    return bool((a - b).abs().le(NEAR * largest).all())


# The recurrence in a trace


class _Cut:
    """Put one operation in place of each group of operators on values without an axis of tokens
    that has the numbers of a recurrence.

    Args:
        traced: a trace at one number of rows and tokens, which is changed.
        tensors: its arguments.
        size: the rows and tokens.
        forms: of the groups, in another trace of the same function; empty if none was tried.

    Attributes:
        found: the forms of the groups that were replaced.
    """

    def __init__(
        self,
        traced: GraphModule,
        tensors: List[Tensor],
        size: Tuple[int, int],
        forms: Sequence["Form"],
    ) -> None:
        self.traced, self.graph = traced, traced.graph
        self.rows, self.length = size
        self.values = self._values(tensors)
        self.data, self.output = self._data(), next(iter(reversed(self.graph.nodes)))
        self.forms, self.found = forms, list[Form]()
        for group in self._groups():
            self._replace(group)

    def _values(self, tensors: List[Tensor]) -> Dict[Node, Any]:
        """Return the values of all nodes in float64."""
        left, values = iter(tensors), dict[Node, Any]()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = widened(next(left))
            elif node.op == "get_attr":
                values[node] = widened(getattr(self.traced, node.target))
            elif node.op == "call_function":
                values[node] = _wide(node, values)
        return values

    def _data(self) -> Set[Node]:
        """Return the nodes that depend on tokens."""
        found: Set[Node] = set()
        for node in self.graph.nodes:
            value: Any = self.values.get(node)
            own = node.op == "placeholder" and self.length in value.shape
            reads = node.op == "call_function" and packet(node) not in LIKE
            if own or reads and found & set(node.all_input_nodes):
                found.add(node)
        return found

    def _has_tokens(self, node: Node) -> bool:
        return any(self.length in y.shape for y in pytree.tree_leaves(self.values[node]))

    def _groups(self) -> List[List[Node]]:
        inside = {n for n in self.data if not self._has_tokens(n)}
        ends = {n for n in self.data - inside if inside & set(n.all_input_nodes)}
        group: Dict[Node, int] = {}
        for place, node in enumerate(n for n in self.graph.nodes if n in inside | ends):
            read = [n for n in node.all_input_nodes if n in inside or {n, node} <= ends]
            self._join(group, {group[n] for n in read}, [node], place)
        for own in dict.fromkeys(group.values()):
            # Sizes within a loop may equal the number of tokens: what lies between belongs to it.
            for node in self._between([n for n in group if group[n] == own]):
                self._join(group, {own, group.get(node, own)}, [node], own)
        order = [n for n in self.graph.nodes if n in group]
        return [[n for n in order if group[n] == g] for g in dict.fromkeys(group.values())]

    def _join(self, group: Dict[Node, int], same: Set[int], new: List[Node], to: int) -> None:
        if same - {to}:
            group.update({n: to for n, g in group.items() if g in same})
        group.update(dict.fromkeys(new, to))

    def _between(self, group: List[Node]) -> List[Node]:
        """Return the nodes that are computed from some of a group, and from which others are."""
        after, before = set(group), set(group)
        for node in self.graph.nodes:
            if node in self.data and after & set(node.all_input_nodes):
                after.add(node)
        for node in reversed(self.graph.nodes):
            if before & set(node.users):
                before.add(node)
        return list(after & before - set(group))

    def _is_smooth(self, node: Node) -> bool:
        masks: Dict[Any, Any] = {aten.where: node.args[:1], aten.masked_fill: node.args[1:2]}
        chosen_by = masks.get(packet(node), ())
        return packet(node).__name__ in SMOOTH and self.data.isdisjoint(chosen_by)

    def _replace(self, group: List[Node]) -> None:
        within = set(group)
        read = [n for n in group if (set(n.users) & self.data) - within or self.output in n.users]
        ends, others = ([n for n in read if self._has_tokens(n) == has] for has in (True, False))
        needed = [n for node in group for n in node.all_input_nodes if n not in within]
        entries = list(dict.fromkeys(n for n in needed if n in self.data))
        if len(ends) != 1 or others or not 2 <= len(entries) <= MOST_ENTRIES:
            return
        if not all(self._is_smooth(node) for node in group):
            return
        end = ends[0]

        def computed(given: Sequence[Tensor]) -> Tensor:
            values = {**self.values, **dict(zip(entries, given, strict=True))}
            for node in group:
                values[node] = _wide(node, values)
            result: Tensor = values[end]
            return result

        fixed = {n: self.values[n] for n in dict.fromkeys(needed) if n not in self.data}
        given = [self.values[n] for n in entries]
        roles = _Roles(computed, self.values[end], given, self.rows, self.length, fixed)
        form = roles.find(self.forms[len(self.found) :][:1])
        if form is None:
            return
        self.found.append(form)
        with self.graph.inserting_after(end):
            marker = self.graph.call_function(aten.alias.default, (end,))
        end.replace_all_uses_with(marker, lambda user: user is not marker)
        with self.graph.inserting_before(marker):
            new = roles.emit(self.graph, form, entries)
        marker.replace_all_uses_with(new)
        self.graph.erase_node(marker)


def _wide(node: Node, values: Dict[Node, Any]) -> Any:
    """Run an operator in float64, whatever it casts to."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = pytree.tree_map(widened, (args, kwargs))
    return node.target(*args, **kwargs)  # type: ignore[operator]


class Form(NamedTuple):
    """How a group is a recurrence.

    Attributes:
        roles: the entries that are q, k, v, decay and rate, by role.
        decay: "log", "minus" or "factor": what the entry of decays is of their logarithms.
        scan: whether k has all entries of a state, each channel of which is a head.
        added: the entry that is added to the output, None for none.
        constant: that it is multiplied with: the place of a value, or a number.
        factor: of the output.
    """

    roles: Dict[str, int]
    decay: str
    scan: bool
    added: Optional[int] = None
    constant: Union[None, int, float] = None
    factor: float = 1.0


class _Roles:
    """Finds the roles of values in a recurrence by shapes and numbers.

    Args:
        computed: what the values give.
        y: what `given` give.
        given: values, each with one axis of rows and one of tokens.
        rows, length: sizes of these axes.
        fixed: values that do not depend on tokens.
    """

    def __init__(
        self,
        computed: Callable[[Sequence[Tensor]], Tensor],
        y: Tensor,
        given: List[Tensor],
        rows: int,
        length: int,
        fixed: Dict[Node, Any],
    ) -> None:
        self.computed, self.given, self.fixed = computed, given, fixed
        self.y, *self.of = y, *given
        self.axes: List[Any] = [_axes(t, rows, length) for t in (y, *given)]

    def find(self, hints: Sequence[Form]) -> Optional[Form]:
        """Return a form with the same numbers, of `hints` if there are any."""
        if any(own is None or None in own for own in self.axes):
            return None
        self.y, *self.of = (
            t.movedim(a, (0, 1)) for t, a in zip((self.y, *self.of), self.axes, strict=True)
        )
        tried = (self._tried(form) for form in hints or self._forms())
        return next((form for form in tried if form is not None), None)

    def _forms(self) -> Iterator[Form]:
        count = len(self.of)
        for places in itertools.product((None, *range(count)), repeat=len(ROLES)):
            roles = {n: p for n, p in zip(ROLES, places, strict=True) if p is not None}
            left = [place for place in range(count) if place not in roles.values()]
            if len(set(roles.values())) < len(roles) or "k" not in roles or len(left) > 1:
                continue
            shapes = {name: self.of[place].shape for name, place in roles.items()}
            if any(self.of[place].shape != self.y.shape for place in left):
                continue
            scan = "v" not in roles
            if not scan and (shapes["v"] != self.y.shape or shapes.get("q") != shapes["k"]):
                continue
            if scan and ("rate" in roles or shapes.get("decay") != shapes["k"]):
                continue
            for decay in ("log", "minus", "factor") if "decay" in roles else ("",):
                yield Form(roles, decay, scan, *left)

    def _tried(self, form: Form) -> Optional[Form]:
        """Return a form with its constants if the recurrence has the numbers, otherwise None."""
        y = self.y
        try:
            got = run(*self._operands(form, self.of, lambda of, *args: of(*args)))
        except (RuntimeError, IndexError, ValueError):  # of other shapes
            return None
        if got.numel() != y.numel():
            return None
        got = got.reshape(y.shape)
        if form.added is not None:
            scale, constant = self._scale(form.added)
            y, form = y - self.of[form.added] * scale, form._replace(constant=constant)
            if constant is None:
                return None
        factor = float((got * y).sum() / (got * got).sum().clamp(min=1e-30))
        if not _near(got * factor, y) or not float(y.abs().max()) > LEAST:
            return None
        same = abs(factor - form.factor) < NEAR * abs(factor)
        return form if same else form._replace(factor=factor)

    @functools.lru_cache(maxsize=None)  # noqa: B019 - lives as long as a trace is cut
    def _scale(self, place: int) -> Tuple[Tensor, Union[None, int, float]]:
        """Return what a value is multiplied with where it is added, all others being 0: numbers,
        and the place of the constant that has them, or the only one of them.
        """
        zeros = [torch.zeros_like(t) for t in self.given]
        zeros[place] = torch.ones_like(zeros[place])
        scale = self.computed(zeros).movedim(self.axes[0], (0, 1))
        fixed = list(self.fixed.values())
        places = [p for p, t in enumerate(fixed) if isinstance(t, Tensor) and _fits(t, scale)]
        first = scale.flatten()[0]
        one = float(first) if _near(first.expand(scale.shape), scale) else None
        return scale, places[0] if places else one

    def _operands(self, form: Form, of: Sequence[Any], op: Any) -> List[Any]:
        """Return q, k, v, decay and rate as `run` takes them. op: calls operators of aten."""
        given = {name: of[place] for name, place in form.roles.items()}
        k, axes = given["k"], {name: self.of[p].dim() for name, p in form.roles.items()}
        heads = self.of[form.roles["k"]].shape[2:]
        if form.decay == "minus":
            given["decay"] = op(aten.neg.default, given["decay"])
        elif form.decay == "factor":
            least = op(aten.clamp.default, given["decay"], LEAST)
            given["decay"] = op(aten.log.default, least)
        if form.scan and "q" in given:  # [B,S,C,N], with q [B,S,N]
            channels = self.y.shape[2:].numel()
            if (heads[:-1].numel(), heads[-1]) != (
                channels,
                self.of[form.roles["q"]].shape[-1],
            ) or axes["q"] != 3:
                raise ValueError("no scan")
            given["k"] = op(aten.flatten.using_ints, k, 2, -2)
            q = op(aten.unsqueeze.default, given["q"], 2)
            given["q"] = op(aten.expand.default, q, [-1, -1, channels, -1])
        elif form.scan:  # [B,S,C]
            given["k"] = op(aten.unsqueeze.default, op(aten.flatten.using_ints, k, 2, -1), -1)
        for name in given.keys() & {"q", "k", "v"} if not form.scan else ():
            if axes[name] == 3:
                given[name] = op(aten.unsqueeze.default, given[name], 2)
        for name in given.keys() & {"decay", "rate"}:
            if axes[name] == 2:
                given[name] = op(aten.unsqueeze.default, given[name], 2)
            elif axes[name] > 3:
                given[name] = op(aten.flatten.using_ints, given[name], 2, -1)
        return [given.get(name) for name in ROLES]

    def emit(self, graph: Graph, form: Form, entries: List[Node]) -> Node:
        """Return a node that computes what the group does from its entries."""
        of: List[Any] = [
            graph.call_function(aten.permute.default, (entry, _order(t.dim(), axes)))
            for entry, t, axes in zip(entries, self.given, self.axes[1:], strict=True)
        ]
        y = graph.call_function(
            RUN, tuple(self._operands(form, of, lambda of, *args: graph.call_function(of, args)))
        )
        if form.factor != 1.0:
            y = graph.call_function(aten.mul.Tensor, (y, form.factor))
        if form.scan or self.y.dim() != 4:
            y = graph.call_function(aten.reshape.default, (y, list(self.y.shape)))
        if form.added is not None:
            more = of[form.added]
            constant: Any = form.constant
            if isinstance(constant, int):
                constant = list(self.fixed)[constant]
            more = graph.call_function(aten.mul.Tensor, (more, constant))
            y = graph.call_function(aten.add.Tensor, (y, more))
        order = _order(self.y.dim(), self.axes[0])
        back = [order.index(axis) for axis in range(len(order))]
        return graph.call_function(aten.permute.default, (y, back))


def _order(count: int, axes: Tuple[int, int]) -> List[int]:
    return [*axes, *(axis for axis in range(count) if axis not in axes)]


def _fits(t: Tensor, scale: Tensor) -> bool:
    """Return whether t, broadcast, are the numbers of scale [B,S,...] at each row and token."""
    try:
        return _near(torch.broadcast_to(t, scale.shape), scale)
    except RuntimeError:  # raised by torch for other shapes
        return False
