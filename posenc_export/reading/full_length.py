"""A call with as many tokens as a module may get. Tables of the module grow, or show a limit."""

import gc
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from posenc_export.reading.causality import affordable
from posenc_export.reading.refused import Refused, joined, place_of_error
from posenc_export.reading.values import SHAPE_ALONE, aten
from posenc_export.reading.whole import OneTensor, count_numbers, of_length

WARMED_AT_MOST = 2048  # tokens of the call
FEW = (6, 12, 24)  # tokens of calls whose operators are counted
CHOOSE = {  # operators that raise for an index behind the last row
    aten.embedding, aten.index, aten.index_select, aten.gather, aten.take, aten.scatter,
    aten.index_put, aten.select_scatter,
}  # fmt: skip
KNOWN = SHAPE_ALONE - {aten.empty_like, aten.new_empty}  # modules write numbers to these two


class Unknown(Tensor):
    """A tensor that depends on the tokens. Its `numbers` are on the meta device, which has only
    shapes, except for ids, and for masks and counts that depend on ids alone.
    """

    numbers: Tensor
    alive: "WeakSet[Unknown]" = WeakSet()

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "Unknown":
        """numbers: of any shape; those of a floating dtype are forgotten."""
        kept = numbers.to("meta") if numbers.is_floating_point() else numbers
        made: Unknown = Tensor._make_wrapper_subclass(
            cls, kept.shape, strides=kept.stride(), dtype=kept.dtype, device=torch.device("cpu")
        )
        made.numbers = kept
        cls.alive.add(made)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:
        """Compute the shapes of an operator of aten, and its numbers if it reads ids alone."""
        given = arguments, dict(named or {})
        inner = [value for value in tree_leaves(given) if isinstance(value, Unknown)]
        known = not any(value.numbers.is_meta for value in inner)
        of = _numbers if known else _shape
        if function.overloadpacket in (KNOWN if known else KNOWN | CHOOSE):
            of = _zeros
        writes = function._schema.is_mutable
        if writes and of is not (_shape if _is_shape(arguments[0]) else _numbers):
            raise RuntimeError("numbers that are not computed are written")
        if of is _shape and "device" in given[1]:
            given[1]["device"] = torch.device("meta")
        given = tree_map(of, given)
        result = function(*given[0], **given[1])
        if writes or function.overloadpacket in KNOWN:
            return arguments[0] if writes else result
        return tree_map(lambda value: cls(value) if isinstance(value, Tensor) else value, result)


def _is_shape(value: Any) -> bool:
    return isinstance(value, Unknown) and value.numbers.is_meta


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, Unknown) else value


def _shape(value: Any) -> Any:
    return _numbers(value).to("meta") if isinstance(value, Tensor) else value


def _zeros(value: Any) -> Any:
    shape_alone = _is_shape(value)
    return torch.zeros(value.shape, dtype=value.dtype) if shape_alone else _numbers(value)


def _without_numbers(plain: OneTensor, x: Tensor) -> OneTensor | None:
    """Return a copy that was called with x, where only numbers that depend on lengths and ids were
    computed. None if the call raises, or if the copy keeps values that depend on the tokens.
    """
    copied = plain.copied()
    try:
        copied.of(Unknown(x))
    except Exception:  # whatever forward raises; the module itself is called then
        return None
    if Unknown.alive:
        gc.collect()
    return None if Unknown.alive else copied


class _Counted(TorchDispatchMode):
    calls = 0  # of operators

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        self.calls += 1
        return function(*args, **(named or {}))


def loops_over_tokens(plain: OneTensor, x: Tensor, most: int) -> bool:
    """Return whether a module calls more operators for more tokens, tried with few tokens."""
    counts = []
    for length in FEW:
        with _Counted() as counted:
            try:
                plain.copied().of(of_length(x[:1], min(length, most)))
            except Exception:  # whatever forward raises; the trace shows why
                return False
        counts.append(counted.calls)
    return counts[2] - counts[1] >= 2 * (counts[1] - counts[0]) > 0


def called_at_full_length(plain: OneTensor, x: Tensor, most: int) -> OneTensor:
    """Call a module with as many tokens as it may get, so that its tables grow. Return the module
    with these tables. Refused: the call raises.
    """
    if most > WARMED_AT_MOST:
        return plain
    x = x[:1]
    longest = of_length(x, most)
    if called := _without_numbers(plain, longest):
        return called
    if most <= affordable(count_numbers(plain.parameters()), WARMED_AT_MOST):
        try:
            plain.of(longest)
        except Exception as error:
            raise _too_long(error, plain, x, most) from error
    return plain


def own_error(error: Exception, plain: OneTensor, x: Tensor) -> Refused:
    layer, line = place_of_error(error, plain.layers())
    said = f"raises {type(error).__name__} for an input {list(x.shape)}: {error}"
    return Refused(joined(layer, said, line))


def _too_long(error: Exception, plain: OneTensor, x: Tensor, most: int) -> Refused:
    """Return the error for a module that raises at `most` tokens, with the most that it takes."""
    taken, failed = x.shape[1], most

    def takes(length: int) -> bool:
        try:
            plain.copied().of(of_length(x, length))
        except Exception:  # whatever forward raises
            return False
        return True

    own = own_error(error, plain, of_length(x, most))
    if not takes(taken):
        return own
    while failed - taken > 1:
        middle = (taken + failed) // 2
        taken, failed = (middle, failed) if takes(middle) else (taken, middle)
    if taken == x.shape[1] and not takes(taken - 1):
        return Refused(f"takes sequences of {taken} tokens only; {own}")
    return Refused(f"takes at most {taken} tokens, and max_positions is {most}; {own}")
