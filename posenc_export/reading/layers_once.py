"""Layers that are alike are traced once. In a trace, each further layer of a kind is one node, in
place of which copies of the nodes of the first layer are inserted afterwards.

Layers are alike if they hold the same besides the numbers of their weights, and are called with the
same values besides tensors of the same shapes. This is what the code of a layer usually reads.
"""

import functools
import io
import itertools
import math
import pickle
import sys
import types
from collections import Counter, deque
from collections.abc import MutableSequence
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Collection, Iterator, NamedTuple, Sequence
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from posenc_export.ops.layers import AGAIN, BEGIN, EDGE, END, layer

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
UNWRITTEN = (pickle.PicklingError, TypeError, ValueError, AttributeError, RecursionError)


class _Call(NamedTuple):
    """A call of a layer: the leaves of its arguments and of its results, and their structures."""

    name: str
    read: list[Any]
    form: Any
    given: list[Any]
    returns: Any

    def __deepcopy__(self, memo: Any) -> "_Call":
        """Return itself: a copy of the module notes the calls of its own layers."""
        return self


_Calls = MutableSequence[_Call]
_Mark = Callable[[list[Any], str, str], list[Any]]  # of leaves, the part and the name of a layer


class LayersOnce:
    """The layers of a module of which a trace has one node each.

    Args:
        module: whose layers stand in lists, nn.ModuleList or nn.Sequential.
        numbered: layers that hold their own index are alike, too, if their code does not read it.

    Attributes:
        templates: for each such layer, the layer whose nodes are copied, by name.
        indices: where these layers hold their index, as names of attributes.
    """

    def __init__(self, module: nn.Module, numbered: bool = False) -> None:
        self.templates: dict[str, str] = {}
        self.indices: list[str] = []
        for name, part in module.named_modules():
            if isinstance(part, (nn.ModuleList, nn.Sequential)):
                layers = {f"{name}.{key}".lstrip("."): one for key, one in part.named_children()}
                self._add(layers, _contents_of([*layers.values()]), numbered)

    def _add(self, layers: dict[str, nn.Module], contents: Sequence[Any], by: bool) -> None:
        names = [*layers]
        for index, content in enumerate(contents):
            for i in (i for i in range(index) if names[i] not in self.templates):
                differ = _numbers_that_differ(contents[i], content, i, index, by)
                found = _where_they_differ(layers[names[i]], layers[names[index]]) if differ else []
                if differ == len(found):
                    self.templates[names[index]] = names[i]
                    self.indices += [f"{names[i]}.{name}" for name in found]
                    break

    def guard_indices(self, module: nn.Module) -> None:
        """Let the numbers in which layers of a kind differ raise if code of a module or function of
        a copy of the module computes with them, since a trace of the first layer would not be that
        of the others. Caches may find a layer by them.
        """
        for name in {*self.indices}:
            part, _, key = name.rpartition(".")
            held = vars(module.get_submodule(part))
            held[key] = _Index(held[key])

    @contextmanager
    def marked(self, module: nn.Module) -> Iterator[None]:
        """Replace forward of layers of the module, or a copy of it, within the context."""
        calls: dict[str, list[_Call]] = {name: [] for name in self.templates.values()}
        with ExitStack() as stack:
            for name in (*calls, *self.templates):
                held = module.get_submodule(name)
                of = calls[self.templates.get(name, name)]
                by = functools.partial(_again, held, of)
                if name in calls:
                    by = functools.partial(_noted, of, name, functools.partial(_marked, held, of))
                traced = functools.partial(by, held.forward)
                stack.enter_context(mock.patch.object(held, "forward", traced))
            yield

    def pass_on(self, module: nn.Module) -> None:
        """Let layers that are like others return what they read, in a copy of the module, if that
        is one tensor like their result; edges (ops/layers.py) say where they begin and end. Layers
        within others stay.
        """
        every = {*self.templates, *self.templates.values()}
        outer = [n for n in self.templates if not any(n.startswith(f"{one}.") for one in every)]
        calls = {self.templates[name]: deque[_Call](maxlen=1) for name in outer}
        for name in (*calls, *outer):
            held, of = module.get_submodule(name), calls[self.templates.get(name, name)]
            by = functools.partial(_passed_on, of, name)
            if name in calls:
                by = functools.partial(_noted, of, name, _edged)
            held.forward = functools.partial(by, held.forward)


def _noted(
    calls: _Calls, name: str, mark: _Mark, own: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    """Call a layer between marks or edges, and note the call."""
    read, form = pytree.tree_flatten((args, kw))
    args, kw = pytree.tree_unflatten(mark(read, BEGIN, name), form)
    given, returns = pytree.tree_flatten(own(*args, **kw))
    given = mark(given, END, name)
    calls.append(_Call(name, read, form, given, returns))
    return pytree.tree_unflatten(given, returns)


def _passed_on(calls: _Calls, name: str, own: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Return the first tensor that a layer reads in the place of its result. Further results are no
    numbers, so that nothing that reads them passes, if they are not what the layer reads.
    """
    read, form = pytree.tree_flatten((args, kw))
    if not calls or calls[0].form != form or not _passes(calls[0], read):
        return own(*args, **kw)
    x, (_, *others) = _tensors(read)[0], _tensors(calls[0].given)
    more = [y if any(y is a for a in read) else y.new_full(y.shape, math.nan) for y in others]
    given = _edged(_exchanged(calls[0].given, [x, *more]), AGAIN, name)
    return pytree.tree_unflatten(given, calls[0].returns)


def _edged(leaves: list[Any], part: str, name: str) -> list[Any]:
    """Return leaves whose first tensor passes through EDGE, with a part and a name of a layer
    (ops/layers.py). Leaves without a tensor stay as they are, and those whose first tensor has no
    floating-point numbers.
    """
    tensors = _tensors(leaves)
    if not tensors or not tensors[0].is_floating_point():
        return leaves
    return _exchanged(leaves, [EDGE(tensors[0], part, name), *tensors[1:]])


def _passes(first: _Call, read: list[Any]) -> bool:
    """Whether a layer is called as the first of its kind but for one tensor, which is like its
    result.
    """
    (before, *_), (x, *_) = ([*_tensors(leaves), None] for leaves in (first.read, read))
    results = _tensors(first.given)
    if not (results and isinstance(x, Tensor) and x.is_floating_point()):
        return False
    if not (_exchangeable(before, x) and _exchangeable(results[0], x)):
        return False
    pairs = [(a, b) for a, b in zip(first.read, read, strict=True) if b is not x]
    equal = (a is b if isinstance(b, Tensor) else _exchangeable(a, b) for a, b in pairs)
    return all(equal) and all(y.is_floating_point() for y in results)


def _marked(held: nn.Module, calls: _Calls, leaves: list[Any], part: str, name: str) -> list[Any]:
    """Return leaves behind a mark with the number of the call, which also reads the weights."""
    tensors = _tensors(leaves)
    read = tensors + _weights(held) if part == BEGIN else tensors
    return _exchanged(leaves, layer(part, f"{name} {len(calls)}", read, tensors))


def _again(held: nn.Module, calls: _Calls, own: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Return results like those of the first layer of its kind, if it was called alike."""
    read, form = pytree.tree_flatten((args, kw))
    first = calls[-1] if calls else None
    if first is None or first.form != form or not all(map(_exchangeable, first.read, read)):
        return own(*args, **kw)
    values = _tensors(read) + _weights(held)
    name = f"{first.name} {len(calls) - 1}"
    given = _exchanged(first.given, layer(AGAIN, name, values, _tensors(first.given)))
    return pytree.tree_unflatten(given, first.returns)


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [value for value in leaves if isinstance(value, Tensor)]


def _weights(held: nn.Module) -> list[Tensor]:
    """Return parameters and buffers by all of their names."""
    named = held.named_parameters, held.named_buffers
    return [tensor for of in named for _, tensor in of(remove_duplicate=False)]


def _exchanged(leaves: list[Any], by: list[Tensor]) -> list[Any]:
    """Return leaves with other tensors."""
    tensors = iter(by)
    return [next(tensors) if isinstance(value, Tensor) else value for value in leaves]


def _exchangeable(first: Any, second: Any) -> bool:
    """Whether two layers that are called with these values are called alike. Sizes that are free
    count as equal, since a trace has symbols for each state.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        fixed = ([n if isinstance(n, int) else None for n in x.shape] for x in (first, second))
        return first.dtype == second.dtype and next(fixed) == next(fixed)
    plain = type(first) is type(second) and type(first) in PLAIN
    return first is second or (plain and bool(first == second))


class _Index:
    """The index of a layer, which caches may use, and not the code of modules and functions."""

    def __init__(self, number: int) -> None:
        self.number = number


def _guarded(operation: str) -> Callable[..., Any]:
    def computed(self: _Index, *others: Any) -> Any:
        caller = sys._getframe(1).f_locals.get("self")
        if caller is None or isinstance(caller, nn.Module):
            raise AttributeError("the code of a layer reads its index")
        return getattr(self.number, operation)(*others)

    return computed


for _name in ("bool", "eq", "format", "ge", "gt", "hash", "index", "le", "lt", "ne", "str"):
    setattr(_Index, f"__{_name}__", _guarded(f"__{_name}__"))


class _Content(pickle.Pickler):
    """What a layer holds besides the numbers of its weights: `text`, in which the whole numbers are
    missing, and these.

    Args:
        held: the layer.
        shared: id() of the parameters and buffers that other layers hold, too. These are compared
            by identity.
    """

    def __init__(self, held: nn.Module, shared: Collection[int]) -> None:
        self.numbers: list[int] = []
        self.shared, self.weights = shared, {id(weight) for weight in _weights(held)}
        written = io.BytesIO()
        super().__init__(written)
        self.dump(held)
        self.text = written.getvalue()

    def persistent_id(self, value: Any) -> Any:
        """Return what is written in the place of a value; None for the value itself."""
        if type(value) is int:
            self.numbers.append(value)
            return "number"
        if isinstance(value, Tensor):
            if id(value) in self.shared or value.is_meta:
                return "tensor", str(id(value))
            of = tuple(value.shape), str(value.dtype)
            if id(value) in self.weights:
                return of
            bits = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
            return of, bits.tobytes()
        named = isinstance(value, (type, types.ModuleType, types.CodeType))
        return ("named", str(id(value))) if named else None

    def reducer_override(self, value: Any) -> Any:
        """Write functions with what they capture, and hooks without their numbers."""
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return object, (), (value.__code__, value.__defaults__, value.__kwdefaults__, cells)
        if isinstance(value, nn.Module):
            held = dict(sorted(vars(value).items()))
            for name in held:
                if name.endswith(("hooks", "_with_kwargs")):  # by numbers of all of the process
                    held[name] = [*held[name].values()]
            return object, (type(value),), held
        return NotImplemented


def _contents_of(layers: Sequence[nn.Module]) -> list[_Content | None]:
    """Return the content of each layer; None of one that holds what cannot be written."""
    owners = Counter(itertools.chain.from_iterable({*map(id, _weights(one))} for one in layers))
    shared = {tensor for tensor, count in owners.items() if count > 1}
    found: list[_Content | None] = []
    for one in layers:
        try:
            found.append(_Content(one, shared))
        except UNWRITTEN:
            found.append(None)
    return found


def _numbers_that_differ(first: Any, second: Any, i: int, j: int, numbered: bool) -> int:
    """Return in how many numbers the i-th and the j-th content differ, -1 if in anything else.
    numbered: these numbers may be i and j.
    """
    if first is None or second is None or first.text != second.text:
        return -1
    pairs = [(a, b) for a, b in zip(first.numbers, second.numbers, strict=True) if a != b]
    return len(pairs) if all(numbered and pair == (i, j) for pair in pairs) else -1


def _where_they_differ(first: nn.Module, second: nn.Module) -> list[str]:
    """Return the names of attributes of two layers that hold other whole numbers."""
    parts = zip(first.named_modules(), second.modules(), strict=False)
    return [
        f"{name}.{key}".lstrip(".")
        for (name, a), b in parts
        for key, value in vars(a).items()
        if type(value) is int and value != vars(b).get(key)
    ]
