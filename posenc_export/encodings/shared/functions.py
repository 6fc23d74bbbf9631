"""Encodings made from one function of positions; the oracle calls it in float64."""

import contextlib
import warnings
from typing import Any, Callable, ClassVar, Iterator

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.rotary import Layout, Rotation
from posenc_export.shared.refusal import refusal

Function = Callable[..., Tensor]
# Start of torch's warning about a trace that depends on a value.
CONVERTED = "Converting a tensor to a Python"
ROUNDED = 2.0**-50  # relative error of angles in float64: a product of three rounded numbers
# Result dtypes of a function that keeps the precision of float64.
ALLOWED = (torch.float64, torch.int64, torch.bool)


def bias(function: Function) -> type[PositionEncoding]:
    """Make an encoding that adds function(head, query, key) to scores.

    Args:
        function: takes int64 tensors that broadcast, head [H,1,1], query [B,1,S,1] and key
            [B,1,1,T], with positions counted from 0. Returns scores that broadcast to [B,H,S,T].
            Uses torch operations that torch.export accepts and does not branch on values. Scores of
            keys that a query does not see may be any number.

    Returns:
        A class, for `register` or an entry point.
    """
    return _named(FunctionBias, function)


def rotation(function: Function) -> type[PositionEncoding]:
    """Make an encoding that rotates pair number `pair` of queries and keys by the angle
    function(pair, position).

    Args:
        function: takes int64 tensors that broadcast, pair [D/2] and position [M,1]. Returns angles
            in radians. It is evaluated once, in float64.

    Returns:
        A class with the parameter `layout`, "half" or "interleaved", for `register` or an entry
        point.
    """
    return _named(FunctionRotation, function)


class FunctionBias(PositionEncoding):
    """scores + f(head, query, key).

    Args:
        geometry: heads H.

    Raises:
        ValueError: a function that returns no tensor or another shape, or that branches on values.
    """

    __jit_ignored_attributes__ = ["function"]
    function: ClassVar[Function]
    head: Tensor

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.register_buffer("head", torch.arange(geometry.heads)[:, None, None], persistent=False)
        query, key = torch.tensor([[7, 8, 9]] * 2), torch.tensor([[5, 6, 7, 8]] * 2)
        example = (self.head, query[:, None, :, None], key[:, None, None])
        shape = tuple(_tensor(self.function(*example), type(self)).shape)
        if not _broadcasts(shape, (2, geometry.heads, 3, 4)):
            rule = "scores that broadcast to [B,H,S,T]"
            remedy = "keep the axes of head, query and key"
            raise refusal(f"bias {type(self).__name__}", rule, list(shape), remedy)
        self.whole = len(shape) == 4 and shape[0] == 2 and shape[2:] == (3, 4)
        self.traced = _traced(self.function, example, type(self))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,1 or H,S,T] float32."""
        query, key = q_positions.unsqueeze(1).unsqueeze(3), k_positions.unsqueeze(1).unsqueeze(2)
        if torch.jit.is_scripting():  # which may not compile the function
            scores = self.traced(self.head, query, key)
        else:
            scores = self.function(self.head, query, key)
        scores = scores.to(torch.float32)
        return scores if self.whole else scores + 0.0 * ops.distances(q_positions, k_positions)


class FunctionBiasOracle(Oracle, of=FunctionBias):
    def bias(self, head: int, query: int, key: int) -> float:
        with float64():
            score = self.encoding.function(*(torch.tensor(number) for number in (head, query, key)))
        return float(_double(score, type(self.encoding)))


class FunctionRotation(Rotation):
    """Pairs of queries and keys rotated by f(pair, position) radians.

    Args:
        geometry: head size D, max_positions.
        layout: "half" pairs (k, k + D/2), "interleaved" pairs (2k, 2k + 1).

    Raises:
        ValueError: an odd head size, an unknown layout, a function that returns no tensor, another
            shape or lower precision.
    """

    __jit_ignored_attributes__ = ["function"]
    function: ClassVar[Function]

    def __init__(self, geometry: Geometry, layout: Layout = "half") -> None:
        if geometry.head_size % 2:
            where, rule = f"rotation {type(self).__name__}", "an even head size"
            raise refusal(where, rule, geometry.head_size, "choose another head size")
        super().__init__(geometry, layout)
        places = np.arange(self.count)[:, None]
        angles = self.numbers(places)
        multiples = places * angles[min(1, self.count - 1)]
        self.linear = np.allclose(angles, multiples, rtol=ROUNDED, atol=0.0)
        self.tabulate(angles)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        cos, sin = self.cos.rows, self.sin.rows
        return ops.rotate_both(q, k, positions, cos, sin, self.interleaved, self.linear)

    def frequency(self, k: int) -> float:
        """1, because the function returns angles."""
        return 1.0

    def numbers(self, place: Any) -> np.ndarray:
        """The angles of a position or of positions [n,1]."""
        pairs = torch.arange(self.size // 2)
        positions = torch.as_tensor(place).to(torch.int64).reshape(-1, 1)
        with float64():
            angles = _double(self.function(pairs, positions), type(self))
        shape = (len(positions), len(pairs))
        if not _broadcasts(tuple(angles.shape), shape):
            where, rule = f"rotation {type(self).__name__}", "angles that broadcast to [M,D/2]"
            remedy = "keep the axes of pair and position"
            raise refusal(where, rule, list(angles.shape), remedy)
        return angles.expand(shape).numpy().reshape(*np.shape(place)[:1], -1)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Context in which torch converts Python floats to float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _named(base: type[PositionEncoding], function: Function) -> type[PositionEncoding]:
    """Make a subclass with the name, module and documentation of the function."""
    if not callable(function):
        rule = "a function of positions"
        raise refusal("encoding", rule, repr(function), "pass a callable that takes tensors")
    name = getattr(function, "__name__", type(function).__name__)
    attributes = {
        "function": staticmethod(function),
        "__qualname__": getattr(function, "__qualname__", name),
        "__module__": getattr(function, "__module__", base.__module__),
        "__doc__": getattr(function, "__doc__", None) or base.__doc__,
    }
    return type(name, (base,), attributes)


def _tensor(result: Any, cls: type[PositionEncoding]) -> Tensor:
    if not isinstance(result, Tensor):
        rule = "a function that returns a tensor"
        remedy = "use torch operations on its arguments"
        raise refusal(f"encoding {cls.__name__}", rule, type(result).__name__, remedy)
    return result


def _double(result: Any, cls: type[PositionEncoding]) -> Tensor:
    """The result of a function as float64; refused if it was computed in a lower precision."""
    tensor = _tensor(result, cls)
    if tensor.dtype not in ALLOWED:
        dtype = str(tensor.dtype).removeprefix("torch.")
        rule = "a function that keeps the precision of float64"
        remedy = "remove casts and tensors of that dtype"
        raise refusal(f"encoding {cls.__name__}", rule, f"a result in {dtype}", remedy)
    return tensor.to(torch.float64)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to `wanted` exactly, without enlarging it."""
    pairs = zip(shape[::-1], wanted[::-1], strict=False)
    return len(shape) <= len(wanted) and all(size in (1, most) for size, most in pairs)


class _Called(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.function(head, query, key)


def _traced(
    function: Function, example: tuple[Tensor, ...], cls: type[PositionEncoding]
) -> torch.nn.Module:
    """Trace a function, for TorchScript."""
    with warnings.catch_warnings(record=True) as raised:
        # torch.jit warns of its deprecation at every call.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("always", torch.jit.TracerWarning)
        traced: torch.nn.Module = torch.jit.trace(_Called(function), example, check_trace=False)
    for message in (str(warning.message) for warning in raised):
        if message.startswith(CONVERTED):  # a trace would record one side of the branch only
            rule = "a function that does not branch on values"
            got = message.partition(" might ")[0]
            raise refusal(f"encoding {cls.__name__}", rule, got, "use torch.where")
    return traced
