"""A module in float64, with the numbers of its tables as the module itself computes them.

What depends on the tokens is computed in float64: weights are converted where they meet it, and
casts to smaller dtypes give float64. What depends on the length alone, such as tables of angles,
masks and biases, is computed in the module's own dtypes, since these numbers are data.
"""

from typing import Any, Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
WIDE |= dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)


class Exact(Tensor):
    """A tensor that depends on the tokens. The module sees `dtype`; `numbers` are in float64."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, dtype: torch.dtype) -> "Exact":
        """numbers: of any shape, in float64, complex128, or an integer dtype, which is kept."""
        made: Exact = Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=dtype,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:
        """Compute an operator of aten on the float64 numbers of its arguments."""
        named = dict(named or {})
        flat: list[Any] = tree_flatten((arguments, named))[0]
        tensors = [value for value in flat if isinstance(value, Tensor)]
        if function._schema.is_mutable and not isinstance(arguments[0], Exact):
            # A tensor of the module's own code receives the numbers in its dtype.
            function(*tree_map(_as_seen, arguments), **tree_map(_as_seen, named))
            return arguments[0]
        dtype = named.get("dtype") or _seen(tensors)
        result = function(*tree_map(widened, arguments), **tree_map(widened, named))
        if function._schema.is_mutable:
            return arguments[0]
        return tree_map(lambda value: _wrapped(value, dtype), result)


def in_float64(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) in float64. function: a module, or calls one and acts on each token.

    x: [B,S] int64, or [B,S,E] float.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one fused operator, which has no float64
    try:
        with torch.no_grad():
            y = function(Exact(widened(x), x.dtype))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return y.numbers if isinstance(y, Exact) else y.double()


def widened(value: Any) -> Any:
    """Return a tensor's numbers in float64, and a dtype as the larger one; others unchanged."""
    if isinstance(value, torch.dtype):
        return WIDE.get(value, value)
    if isinstance(value, Exact):
        return value.numbers
    if isinstance(value, Tensor):
        return value.to(WIDE.get(value.dtype, value.dtype))
    return value


def _as_seen(value: Any) -> Any:
    return value.numbers.to(value.dtype) if isinstance(value, Exact) else value


def _seen(tensors: list[Tensor]) -> torch.dtype:
    """Return the dtype that the module sees for a result: the common dtype of its arguments.
    Arguments without axes only count if there are no others.
    """
    floats = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    dtype = torch.bool
    for tensor in [t for t in floats if t.dim()] or floats:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype if floats else torch.get_default_dtype()


def _wrapped(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_complex():
        seen = dtype if dtype.is_complex else torch.promote_types(dtype, torch.complex32)
        return Exact(value.to(torch.complex128), seen)
    if value.is_floating_point():
        return Exact(value.double(), dtype.to_real() if dtype.is_complex else dtype)
    return Exact(value, value.dtype)
