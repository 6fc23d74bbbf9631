"""Faults in float16 and bfloat16 of encodings from outside this package, found before a model is
traced and named with file and line.
"""

import copy
import sys
from pathlib import Path
from typing import Any, List, Sequence, Set, Tuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.encodings.shared.combined import overrides
from posenc_export.models.placed import placed
from posenc_export.models.user_module import Model, inner_of
from posenc_export.shared.numerics import (
    BFLOAT16_NOISE,
    FLOAT16_NOISE,
    Errors,
    cell_error,
    rounding_tolerance,
)

PACKAGE = "posenc_export"
LIBRARIES = tuple(str(Path(package.__path__[0])) for package in (torch, sys.modules[PACKAGE]))
PLACES = (0, 1, 2, 255, 1000)  # positions of the tokens, besides the last two
EXACT = "keep trained numbers that multiply positions in an Exact, and compute with them in float32"
FIXED = "keep them in a Table, whose rows stay float32"
CONVERT = "convert tables and results to the dtype of the inputs, as in .to(q.dtype)"
LONGEST = 200  # characters of an error of torch


class Lines(TorchFunctionMode):
    """Records which lines outside this package and torch make tensors of which dtype.

    Attributes:
        last: the last such line, as FILE:LINE.
        made: (line, dtype, dtypes of the operands) of every new tensor, oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        self.made: List[Tuple[str, torch.dtype, Set[torch.dtype]]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        self.last = _line() or self.last
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.made.append(
                (self.last, result.dtype, {one.dtype for one in args if isinstance(one, Tensor)})
            )
        return result

    def first(self, dtype: torch.dtype, of: torch.dtype) -> str:
        """Return the first line that makes a tensor of this dtype with an operand of dtype `of`;
        the last line if there is none.
        """
        return next(
            (line for line, made, operands in self.made if made == dtype and of in operands),
            self.last,
        )


def _line() -> str:
    """Return the innermost line of the call stack outside this package and torch, as FILE:LINE;
    "" if there is none.
    """
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != __file__:
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def check_model(model: Model, dtype: str) -> None:
    """Check the encodings of a model that come from outside this package in the dtype of its
    activations.

    Args:
        model: in float32.
        dtype: "float32", which is not checked, "float16" or "bfloat16".

    Raises:
        ValueError: see check_encoding.
    """
    seen: Set[int] = set()
    for each in placed(inner_of(model)) if dtype != "float32" else ():
        for _, part in each.parts:
            if type(part).__module__.partition(".")[0] != PACKAGE and id(part) not in seen:
                seen.add(id(part))
                check_encoding(part, each.geometry, dtype)


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
    _check_buffers(encoding, cast, dtype)
    for hook in ("embed_next", "rotate", "bias"):
        if overrides(encoding, hook, *["embed"] * (hook == "embed_next")):
            rule = f"encoding {type(encoding).__name__}: expected {hook.removesuffix('_next')}"
            with torch.no_grad():
                lines, results = _in_half(rule, cast, hook, geometry, half)
                expected = _results(
                    hook,
                    geometry,
                    getattr(plain, hook)(*_arguments(plain, hook, geometry, torch.float32)),
                )
            _compare(rule, dtype, lines, results, expected)


def _check_buffers(encoding: PositionEncoding, cast: PositionEncoding, dtype: str) -> None:
    """Check that fixed numbers keep their values: a formula knows trained numbers as they are
    after the cast, and fixed ones as they were before.
    """
    for name, buffer in encoding.named_buffers():
        if not torch.equal(cast.get_buffer(name).to(buffer.dtype), buffer):
            found = f"buffer {name}, which the cast rounds"
            raise ValueError(
                f"encoding {type(encoding).__name__}: expected fixed numbers that keep their "
                f"values in a model of {dtype}, got {found}; {FIXED}"
            )


def _in_half(
    rule: str, encoding: PositionEncoding, hook: str, geometry: Geometry, half: torch.dtype
) -> Tuple[Lines, List[Tensor]]:
    """Call a hook in half precision; return the lines that it ran and its results, of the dtypes
    of the contract. rule: beginning of errors.
    """
    name, wanted = _name(half), torch.float32 if hook == "bias" else half
    arguments = _arguments(encoding, hook, geometry, half)
    with Lines() as lines:
        try:
            results = _results(hook, geometry, getattr(encoding, hook)(*arguments))
        except RuntimeError as error:
            problem = f"{' '.join(str(error).split())[:LONGEST]} at {lines.last}"
            raise ValueError(f"{rule} to run in {name}, got {problem}; {CONVERT}") from error
    other = next((result.dtype for result in results if result.dtype != wanted), None)
    if other is not None:
        found = f"{_name(other)}, made at {lines.first(other, half)}"
        raise ValueError(
            f"{rule} to return {_name(wanted)} in a model of {name}, got {found}; "
            f"{EXACT if hook == 'bias' else CONVERT}"
        )
    return lines, results


def _compare(
    rule: str, dtype: str, lines: Lines, results: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    """Compare results in half precision with those of the same weights in float32. rule:
    beginning of the error.
    """
    errors = Errors()
    for result, exact in zip(results, expected, strict=True):
        errors.add(result.double().numpy(), exact.double().numpy())
    bound, error = (
        rounding_tolerance(BFLOAT16_NOISE if dtype == "bfloat16" else FLOAT16_NOISE),
        cell_error(errors, rounds=True),
    )
    if not error <= bound:
        place = lines.first(getattr(torch, dtype), torch.int64)
        raise ValueError(
            f"{rule} in {dtype} within {bound:.1e} of float32, got {error:.1e}, with "
            f"positions rounded to {dtype} at {place}; {EXACT}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _results(hook: str, geometry: Geometry, returned: Any) -> List[Tensor]:
    """Return the tensors that a hook returned, without states, and with 0 for the biases of
    hidden keys, which may be any number.
    """
    if hook != "bias":
        return [one for one in returned if isinstance(one, Tensor)]
    hidden = torch.ones(len(_places(geometry)), len(_places(geometry)), dtype=torch.bool).triu(1)
    return (
        []
        if returned is None
        else [returned.masked_fill(hidden, 0.0) if geometry.causal else returned]
    )


def _places(geometry: Geometry) -> List[int]:
    last = geometry.max_positions - 1
    return sorted({place for place in (*PLACES, last - 1, last) if 0 <= place <= last})


def _arguments(
    encoding: PositionEncoding, hook: str, geometry: Geometry, dtype: torch.dtype
) -> Tuple[Any, ...]:
    """Return the arguments of a hook: random numbers that are exact in half precision, for small
    and large positions.
    """
    places, random = torch.tensor([_places(geometry)]), torch.Generator().manual_seed(0)
    coordinates = places.expand(encoding.axes, 1, -1) if encoding.axes else places

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(1, places.size(1), *sizes, generator=random).bfloat16().to(dtype)

    if hook == "rotate":
        return (
            numbers(geometry.heads, geometry.head_size),
            numbers(geometry.kv_heads or geometry.heads, geometry.head_size),
            coordinates,
        )
    if hook == "bias":
        return places, places
    states = [
        torch.zeros(1, *state.sizes, dtype=getattr(torch, state.dtype) if state.dtype else dtype)
        for state in encoding.embed_states()
    ]
    return numbers(encoding.token_width(geometry.width)), coordinates, states
