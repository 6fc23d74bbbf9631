"""Functions that a module calls to run a recurrence, found in one call and proved by numbers.

A loop over tokens or chunks, or a closed form of one, takes values apart that have an axis of
tokens and joins others that have one again. Where the numbers between are those of the gated
linear recurrence S = e^g S + r k (v - S^T k)^T or S = e^g S + k v^T, y = S^T q, a trace of the
function has one operation in their place.
"""

import dataclasses
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
    Optional,
    Sequence,
    Tuple,
)
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from posenc_export.reading.exact import Exact, widened
from posenc_export.reading.joined import Joined, Trace
from posenc_export.reading.recurrent_groups import Cut, Form, axes_of, near
from posenc_export.reading.refused import NOT_THE_PERSONS
from posenc_export.reading.whole import OneTensor, of_length
from posenc_export.reading.writes import writes

ROWS, LENGTHS = (3, 5, 11, 47, 53), (7, 9, 13, 17, 19, 23, 29, 31, 37)  # of the calls to trace
TRACES = 3  # of a function, which show how numbers in it depend on rows and tokens
PROVED = (1, 2, 33, 64, 65, 130)  # tokens for which a function is called again
LONGEST = 1024  # whole numbers among its arguments may be sizes of chunks
FAILED = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError)
Stand = Callable[..., Any]
_called: Dict[int, Stand] = {}  # by number of a function whose calls are taken over
_numbers = itertools.count()


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
        axes = [axes_of(t, *sizes[0]) for t in given]
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
        self.forms = Cut(traced, tensors, size, self.forms).found
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
        return all(near(a.double(), b.double()) for a, b in pairs)


def _traced(given: Stand, tensors: List[Tensor]) -> GraphModule:
    """Return the trace of a function as its code writes it; in operators without effects where it
    writes into its values.
    """
    # Values of nodes are not needed, and take most of the time of a trace.
    with mock.patch.object(proxy_tensor, "extract_val", lambda value, **_: None):
        traced = make_fx(given, pre_dispatch=True)(*tensors)
        if any(writes(node) for node in traced.graph.nodes):
            traced = make_fx(torch.func.functionalize(given, remove="mutations"))(*tensors)
    return traced


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
