"""What a module's forward pass reads besides the numbers of its weights, as a value to compare."""

import functools
import itertools
import types
from collections import Counter
from typing import Any, Collection, Dict, Iterator, List, Sequence, Tuple

import msgspec
import numpy as np
import torch

Content = Tuple[Any, ...]
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
TENSORS = ("_parameters", "_buffers")


def contents_of(layers: Sequence[torch.nn.Module]) -> List[Content]:
    """Return the content of each layer (content_of). Tensors of several layers are compared by
    identity.
    """
    of_layers = [{id(tensor) for _, tensor in tensors_of(layer)} for layer in layers]
    owners = Counter(itertools.chain.from_iterable(of_layers))
    shared = {tensor for tensor, count in owners.items() if count > 1}
    return [content_of(layer, shared) for layer in layers]


def tensors_of(layer: torch.nn.Module) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a layer by all of their names."""
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)


def content_of(module: torch.nn.Module, shared: Collection[int]) -> Content:
    """Return the content of a module. Modules of equal content compute the same with equal weights.

    It has the classes of all modules within, their plain attributes, hooks and functions with the
    values that these capture, and the names, shapes and dtypes of parameters and buffers, whose
    numbers are not compared. A tensor that is not registered is a constant, and is compared.

    Args:
        shared: id() of parameters and buffers that also belong to other modules. These are
            compared by identity.
    """
    return _Walk(shared).of(module)


class _Numbers:
    """The numbers of a constant.

    Tables of positions are large, and usually one array for all layers.
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Numbers):
            return NotImplemented
        return self.array is other.array or _bits_equal(self.array, other.array)

    __hash__ = None  # type: ignore[assignment]


def _bits_equal(first: Any, second: Any) -> bool:
    """Whether two arrays, or two tensors, of one dtype and shape hold the same bits."""
    if isinstance(first, torch.Tensor):
        parts = (part.detach().contiguous().view(-1).view(torch.uint8) for part in (first, second))
        return torch.equal(*parts)
    if first.dtype.hasobject:
        return False
    rows = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in (first, second)]
    return np.array_equal(rows[0], rows[1])


class _Walk:
    """One pass over all objects that a module refers to. shared: as for content_of."""

    def __init__(self, shared: Collection[int]) -> None:
        self.shared = shared
        self.seen: Dict[int, int] = {}  # number of each object, by its id(), in order of the pass
        self.held: Any = []  # objects made on the way, whose ids must stay theirs

    def of(self, value: Any) -> Content:
        if isinstance(value, PLAIN):
            return type(value), repr(value)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return self._constant(value)
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        self.held.append(value)
        if isinstance(value, torch.nn.Module):
            return type(value), *self._module(value)
        if isinstance(value, dict):
            return type(value), *((self.of(key), self.of(part)) for key, part in value.items())
        if isinstance(value, (list, tuple)):
            return type(value), *map(self.of, value)
        return self._object(value)

    def _module(self, module: torch.nn.Module) -> Content:
        parts = []
        for name, value in vars(module).items():
            if name in TENSORS:
                part: Any = tuple((key, self._registered(member)) for key, member in value.items())
            elif isinstance(value, dict) and name.endswith(("hooks", "_with_kwargs")):
                part = self.of(list(value.values()))  # the keys number all hooks of the process
            else:
                part = self.of(value)
            parts.append((name, part))
        return tuple(sorted(parts, key=lambda pair: pair[0]))

    def _registered(self, tensor: Any) -> Content:
        if tensor is None:
            return (None,)
        identity = id(tensor) if id(tensor) in self.shared else None
        return tuple(tensor.shape), tensor.dtype, identity

    def _constant(self, value: Any) -> Content:
        if isinstance(value, torch.Tensor) and (value.is_meta or id(value) in self.shared):
            return type(value), id(value)
        return type(value), tuple(value.shape), str(value.dtype), _Numbers(value)

    def _object(self, value: Any) -> Content:
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            parts = (value.__defaults__, value.__kwdefaults__, cells)
            return "function", id(value.__code__), *map(self.of, parts)
        if isinstance(value, types.MethodType):
            return "method", self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return "partial", *map(self.of, (value.func, value.args, value.keywords))
        if isinstance(value, (set, frozenset)):
            return type(value), *sorted((self.of(part) for part in value), key=repr)
        if isinstance(value, msgspec.Struct):
            fields = value.__struct_fields__
            return type(value), *(self.of(getattr(value, name)) for name in fields)
        if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
            return "object", id(value)
        return type(value), *((name, self.of(part)) for name, part in sorted(vars(value).items()))
