"""Checks of foreign encodings in half precision, which name file and line before a trace."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.encodings.shared.combined import overrides
from posenc_export.export.read_module import Model
from posenc_export.models.whole_pass import foreign_encodings
from posenc_export.shared import numerics
from posenc_export.shared.refusal import refusal

PLACES = (0, 1, 2, 255, 1000)  # positions of the tokens, besides the last two
EXACT = "keep trained numbers that multiply positions in an Exact, and compute with them in float32"
FIXED = "keep them in a Table, whose rows stay float32"
CONVERT = "convert tables and results to the dtype of the inputs, as in .to(q.dtype)"
LONGEST = 200  # characters of an error of torch


def check_model(model: Model, dtype: str) -> None:
    """Check the encodings of a model that come from outside this package in the dtype of its
    activations. model: in float32; dtype: "float32", which is not checked, "float16" or "bfloat16".
    ValueError: see check_encoding.
    """
    for encoding in foreign_encodings(model) if dtype != "float32" else ():
        check_encoding(encoding, encoding.built[1], dtype)


def check_encoding(encoding: PositionEncoding, geometry: Geometry, dtype: str) -> None:
    """Cast an encoding to `dtype`, call embed, rotate and bias, and compare them with the same
    weights in float32.

    Args:
        encoding: in float32; it is not modified.
        geometry: sizes that it was built for.
        dtype: "float16" or "bfloat16".

    Raises:
        ValueError: a buffer that the cast rounds; a hook that fails, that returns another dtype
            than the contract says, or that rounds positions. The message has the name of the
            buffer, or file and line.
    """
    half = getattr(torch, dtype)
    cast = copy.deepcopy(encoding).to(half)
    plain = copy.deepcopy(cast).float()
    plain.prepare()
    for name, buffer in encoding.named_buffers():  # formulas need their numbers without rounding
        if not torch.equal(cast.get_buffer(name).to(buffer.dtype), buffer):
            got = f"buffer {name}, which the cast rounds"
            rule = f"fixed numbers that keep their values in a model of {dtype}"
            raise refusal(f"encoding {type(encoding).__name__}", rule, got, FIXED)
    for hook in ("embed_next", "rotate", "bias"):
        if overrides(encoding, hook, *["embed"] * (hook == "embed_next")):
            with torch.no_grad():
                _check_hook(cast, plain, hook, geometry, dtype)


def _check_hook(
    cast: PositionEncoding, plain: PositionEncoding, hook: str, geometry: Geometry, dtype: str
) -> None:
    """Check that a hook runs in half precision with results of the dtypes of the contract, and
    compare them with those of the same weights in float32.
    """
    name = "embed" if hook == "embed_next" and not overrides(cast, hook) else hook
    code = inspect.unwrap(getattr(type(cast), name)).__code__
    place = f"{code.co_filename}:{code.co_firstlineno}"
    rule = f"encoding {type(cast).__name__}: expected {hook.removesuffix('_next')} at {place}"
    try:
        results = _results(cast, hook, geometry, getattr(torch, dtype))
    except RuntimeError as error:
        problem = " ".join(str(error).split())[:LONGEST]
        raise ValueError(f"{rule} to run in {dtype}, got {problem}; {CONVERT}") from error
    wanted, remedy = ("float32", EXACT) if hook == "bias" else (dtype, CONVERT)
    errors = numerics.Errors()
    exact = _results(plain, hook, geometry, torch.float32)
    for result, numbers in zip(results, exact, strict=True):
        got = str(result.dtype).removeprefix("torch.")
        if got != wanted:
            raise ValueError(
                f"{rule} to return {wanted} in a model of {dtype}, got {got}; {remedy}"
            )
        errors.add(result.double().numpy(), numbers.double().numpy())
    bound = numerics.rounding_tolerance(numerics.NOISE[dtype])
    worst = numerics.cell_error(errors, rounds=True)
    if not worst <= bound:
        raise ValueError(
            f"{rule} within {bound:.1e} of float32 in {dtype}, got {worst:.1e}, with positions "
            f"rounded to {dtype}; {EXACT}"
        )


def _results(
    encoding: PositionEncoding, hook: str, geometry: Geometry, dtype: torch.dtype
) -> list[Tensor]:
    """Return the tensors that a hook returns, except states, with 0 for biases of hidden keys."""
    returned = getattr(encoding, hook)(*_arguments(encoding, hook, geometry, dtype))
    if hook != "bias":
        return [result for result in returned if isinstance(result, Tensor)]
    if returned is None:
        return []
    hidden = torch.ones(len(_places(geometry)), len(_places(geometry)), dtype=torch.bool).triu(1)
    return [returned.masked_fill(hidden, 0.0) if geometry.causal else returned]


def _places(geometry: Geometry) -> list[int]:
    last = geometry.max_positions - 1
    return sorted({place for place in (*PLACES, last - 1, last) if 0 <= place <= last})


def _arguments(
    encoding: PositionEncoding, hook: str, geometry: Geometry, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Return arguments of a hook, exact in half precision, for small and large positions."""
    places, random = torch.tensor([_places(geometry)]), torch.Generator().manual_seed(0)
    planes = encoding.axes + encoding.with_position
    coordinates = places.expand(planes, 1, -1) if planes else places

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(1, places.size(1), *sizes, generator=random).bfloat16().to(dtype)

    if hook == "rotate":
        counts = geometry.heads, geometry.kv_heads or geometry.heads
        return *(numbers(count, geometry.head_size) for count in counts), coordinates
    if hook == "bias":
        return places, places
    states = [
        torch.zeros(1, *state.sizes, dtype=getattr(torch, state.dtype) if state.dtype else dtype)
        for state in encoding.embed_states()
    ]
    return numbers(encoding.token_width(geometry.width)), coordinates, states
