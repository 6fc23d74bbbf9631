"""Check that a user's own module has the form that OwnModule requires, by one call."""

from typing import Any, List, Tuple, Union

import torch
from torch import Tensor

from posenc_export.models.block import AttentionBlock
from posenc_export.models.stack import Stack
from posenc_export.models.whole_pass import empty_states

Inner = Union[AttentionBlock, Stack]
CALL = "forward(x, positions, coordinates, key_positions, write_index, states)"
BATCH, LENGTH = 2, 3  # sizes B and S of the trial call


def only_inner(module: torch.nn.Module, where: str) -> Inner:
    """Return the block or stack inside a module.

    Raises:
        ValueError: there is none, or more than one.
    """
    inside = [part for part in module.modules() if isinstance(part, (AttentionBlock, Stack))]
    if len(inside) != 1:
        several = (
            "describe all layers as one Stack, which reads hidden states with decoder_config(0, "
            "layers, ...)"
        )
        remedy = (
            several
            if inside
            else "build one from its weights and put it in, as docs/from-your-weights.md shows"
        )
        raise ValueError(
            f"{where}: expected one AttentionBlock or Stack in it, got "
            f"{len(inside) or 'none'}; {remedy}"
        )
    return inside[0]


def outputs_of(where: str, module: torch.nn.Module, vocabulary: int, width: int) -> int:
    """Call a module with empty caches, and return the number of outputs N for each token.

    Args:
        where: beginning of error messages.
        module: module in eval mode with one block or stack inside.
        vocabulary: number of token ids if x is token ids; 0 if x is hidden states.
        width: width of hidden states.

    Raises:
        ValueError: the module's forward does not have the required form.
    """
    inner = only_inner(module, where)
    arguments, calls = _first_call(inner, vocabulary, width), []
    hook = inner.register_forward_hook(
        lambda _, received, returned: calls.append((received, returned))
    )
    try:
        with torch.no_grad():
            returned = module(*arguments)
    except (IndexError, RuntimeError, TypeError) as error:
        takes = f"token ids below {vocabulary}" if vocabulary else f"hidden states of width {width}"
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = (
            "correct forward, or declare x by OwnModule(module, vocabulary=V) or "
            "OwnModule(module, width=E)"
        )
        raise ValueError(
            f"{where}: expected {CALL} with x as {takes}, got {got}; {remedy}"
        ) from error
    finally:
        hook.remove()
    if len(calls) != 1:
        raise ValueError(
            f"{where}: expected forward to call the block once, got {len(calls)} calls; call "
            "it once"
        )
    received, of_block = calls[0]
    _check_received(where, arguments, received)
    return _check_returned(where, returned, of_block[1])


def _first_call(inner: Inner, vocabulary: int, width: int) -> Tuple[Any, ...]:
    """Return the arguments of a first call, with empty caches."""
    x = (
        torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        if vocabulary
        else torch.ones(BATCH, LENGTH, width)
    )
    positions = torch.arange(LENGTH).clamp(max=inner.config.max_positions - 1).repeat(BATCH, 1)
    coordinates = positions.expand(inner.axes, -1, -1) if inner.axes else positions
    return (
        x,
        positions,
        coordinates,
        positions,
        torch.zeros(BATCH, dtype=torch.int64),
        empty_states(inner, x),
    )


def _check_received(where: str, arguments: Tuple[Any, ...], received: Tuple[Any, ...]) -> None:
    """Check that the block got the arguments of forward."""
    names = CALL[len("forward(") : -1].split(", ")
    if len(received) != len(arguments):
        rule = (
            f"{where}: expected the block to be called with {', '.join(names)} as positional "
            "arguments"
        )
        raise ValueError(
            f"{rule}, got {len(received)} positional arguments; pass all of them by position"
        )
    for name, argument, other in list(zip(names, arguments, received, strict=True))[1:]:
        if argument is not other:
            raise ValueError(
                f"{where}: expected {name} to be passed to the block unchanged, got another "
                "value; pass on the argument of forward"
            )


def _check_returned(where: str, returned: Any, states: List[Tensor]) -> int:
    """Check what forward returned, and return the number of outputs for each token."""
    rule = f"{where}: expected forward to return an output [B,S,N] and the states from the block"
    if isinstance(returned, tuple) and (
        len(returned) > 2 or len(returned) == 2 and isinstance(returned[0], (tuple, list, dict))
    ):
        raise ValueError(f"{rule}, got several outputs; concatenate them along the last axis")
    if (
        not isinstance(returned, tuple)
        or len(returned) != 2
        or not isinstance(returned[0], Tensor)
        or not isinstance(returned[1], (list, tuple))
    ):
        raise ValueError(f"{rule}, got {type(returned).__name__}; return output, states")
    output, passed_on = returned
    if output.dim() != 3 or output.shape[:2] != (BATCH, LENGTH) or output.dtype != torch.float32:
        got = (
            f"an output {list(output.shape)} of {str(output.dtype).removeprefix('torch.')} for "
            f"B={BATCH}, S={LENGTH}"
        )
        raise ValueError(f"{rule}, got {got}; return N numbers in float32 for each token")
    if len(passed_on) != len(states) or any(
        state is not other for state, other in zip(passed_on, states, strict=True)
    ):
        raise ValueError(f"{rule}, got other states; return the states from the block unchanged")
    return output.size(2)
