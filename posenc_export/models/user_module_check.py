"""Check by one call that a user's own module has the form that OwnModule requires, and a numpy
function in place of the block inside it.
"""

from typing import Any, Callable, List, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.block import AttentionBlock
from posenc_export.models.stack import Stack
from posenc_export.models.whole_pass import coordinates_at, empty_states
from posenc_export.shared.refusal import refusal

Inner = Union[AttentionBlock, Stack]
Rows = Callable[[np.ndarray], np.ndarray]
CALL = "forward(x, positions, coordinates, key_positions, write_index, states)"
BATCH, LENGTH = 2, 3  # sizes B and S of the trial call


class Formula(torch.nn.Module):
    """Replacement of the block `inner` in a copy of the module: calls a numpy function of one row x
    [n] int64 or [n,E] float64 to [n,N], in a dtype.
    """

    def __init__(self, inner: Inner, rows: Rows, dtype: torch.dtype) -> None:
        super().__init__()
        # A tuple: no submodule, so that casts of the copy leave it alone.
        self.block = (inner, rows, dtype)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block, such as a tied table."""
        block = self.__dict__.get("block")
        if block and hasattr(block[0], name):
            return getattr(block[0], name)
        return super().__getattr__(name)

    def forward(self, x: Tensor, *where: Any) -> Tuple[Tensor, List[Tensor]]:
        """x [1,n] int64 or [1,n,E] to outputs [1,n,N] and no states."""
        _, rows, dtype = self.block
        row = x[0].detach() if x.dim() == 2 else x[0].detach().double()
        return torch.from_numpy(rows(row.numpy()))[None].to(dtype), []


def only_inner(module: torch.nn.Module, where: str) -> Inner:
    """Return the block or stack inside a module. ValueError: there is none, or more than one."""
    inside = [part for part in module.modules() if isinstance(part, (AttentionBlock, Stack))]
    if len(inside) != 1:
        remedy = "build one from its weights and put it in, as docs/from-your-weights.md shows"
        if inside:
            remedy = "describe all layers as one Stack, which reads hidden states with "
            remedy += "decoder_config(0, layers, ...)"
        rule = "one AttentionBlock or Stack in it"
        raise refusal(where, rule, len(inside) or "none", remedy)
    return inside[0]


def outputs_of(where: str, module: torch.nn.Module, vocabulary: int, width: int) -> int:
    """Call a module in eval mode with empty caches, and return the number of outputs N for each
    token.

    Args:
        where: beginning of error messages.
        vocabulary: number of token ids if x is token ids; 0 if x is hidden states of a width.

    Raises:
        ValueError: the module's forward does not have the required form.
    """
    inner = only_inner(module, where)
    arguments, calls = _first_call(inner, vocabulary, width), []
    hook = inner.register_forward_hook(lambda _, *of_call: calls.append(of_call))
    try:
        with torch.no_grad():
            returned = module(*arguments)
    except (IndexError, RuntimeError, TypeError) as error:
        takes = f"token ids below {vocabulary}" if vocabulary else f"hidden states of width {width}"
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = "correct forward, or declare x by OwnModule(module, vocabulary=V) or "
        remedy += "OwnModule(module, width=E)"
        raise refusal(where, f"{CALL} with x as {takes}", got, remedy) from error
    finally:
        hook.remove()
    if len(calls) != 1:
        rule = "forward to call the block once"
        raise refusal(where, rule, f"{len(calls)} calls", "call it once")
    received, of_block = calls[0]
    _check_received(where, arguments, received)
    return _check_returned(where, returned, of_block[1])


def _first_call(inner: Inner, vocabulary: int, width: int) -> Tuple[Any, ...]:
    ids, states = torch.zeros(BATCH, LENGTH, dtype=torch.int64), torch.ones(BATCH, LENGTH, width)
    x = ids if vocabulary else states
    positions = torch.arange(LENGTH).clamp(max=inner.config.max_positions - 1).repeat(BATCH, 1)
    coordinates = coordinates_at(inner, positions)
    write_index = torch.zeros(BATCH, dtype=torch.int64)
    return x, positions, coordinates, positions, write_index, empty_states(inner, x)


def _check_received(where: str, arguments: Tuple[Any, ...], received: Tuple[Any, ...]) -> None:
    names = CALL[len("forward(") : -1].split(", ")
    if len(received) != len(arguments):
        rule = f"the block to be called with {', '.join(names)} as positional arguments"
        got = f"{len(received)} positional arguments"
        raise refusal(where, rule, got, "pass all of them by position")
    for name, argument, other in list(zip(names, arguments, received, strict=True))[1:]:
        if argument is not other:
            rule = f"{name} to be passed to the block unchanged"
            raise refusal(where, rule, "another value", "pass on the argument of forward")


def _check_returned(where: str, returned: Any, states: List[Tensor]) -> int:
    """Check what forward returned, and return the number of outputs for each token."""
    rule = "forward to return an output [B,S,N] and the states from the block"
    whole = isinstance(returned, tuple)
    pair = whole and len(returned) == 2
    if whole and (len(returned) > 2 or pair and isinstance(returned[0], (tuple, list, dict))):
        remedy = "concatenate them along the last axis"
        raise refusal(where, rule, "several outputs", remedy)
    tensor = pair and isinstance(returned[0], Tensor)
    if not tensor or not isinstance(returned[1], (list, tuple)):
        raise refusal(where, rule, type(returned).__name__, "return output, states")
    output, passed_on = returned
    if output.dim() != 3 or output.shape[:2] != (BATCH, LENGTH) or output.dtype != torch.float32:
        dtype = str(output.dtype).removeprefix("torch.")
        got = f"an output {list(output.shape)} of {dtype} for B={BATCH}, S={LENGTH}"
        raise refusal(where, rule, got, "return N numbers in float32 for each token")
    unchanged = len(passed_on) == len(states)
    if not unchanged or any(a is not b for a, b in zip(passed_on, states, strict=True)):
        remedy = "return the states from the block unchanged"
        raise refusal(where, rule, "other states", remedy)
    return output.size(2)
