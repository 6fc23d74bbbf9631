"""Check that a user's own module has the form that OwnModule requires, by one call."""

from typing import Any, List, Tuple, Union

import torch
from torch import Tensor

from posenc_export.models.block import AttentionBlock
from posenc_export.models.stack import Stack

Inner = Union[AttentionBlock, Stack]
CALL = "forward(x, positions, coordinates, key_positions, write_index, states)"
BATCH, LENGTH = 2, 3  # sizes B and S of the trial call


def only_inner(module: torch.nn.Module, where: str) -> Inner:
    """Return the block or stack inside a module.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = [part for part in module.modules() if isinstance(part, (AttentionBlock, Stack))]
    if len(found) != 1:
        remedy = "describe all layers as one Stack" if found else "put one into it"
        raise ValueError(f"{where}: expected one AttentionBlock or Stack in it, got {len(found) or 'none'}; {remedy}")
    return found[0]


class FormCheck:
    """A trial call of a module with empty caches. It records how the module calls its block.

    Args:
        where: beginning of error messages.
        module: module in eval mode with one block or stack inside.
        vocabulary: number of token ids if x is token ids; 0 if x is hidden states.
        width: width of hidden states.
    """

    def __init__(self, where: str, module: torch.nn.Module, vocabulary: int, width: int) -> None:
        self.where, self.module, self.vocabulary, self.width = where, module, vocabulary, width
        self.inner = only_inner(module, where)

    def outputs(self) -> int:
        """Return the number of outputs N for each token.

        Raises:
            ValueError: the module's forward does not have the required form.
        """
        calls: List[Any] = []
        given = self._arguments()
        hook = self.inner.register_forward_hook(lambda _, arguments, made: calls.append((arguments, made)))
        try:
            with torch.no_grad():
                made = self.module(*given)
        except (IndexError, RuntimeError, TypeError) as error:
            takes = f"token ids below {self.vocabulary}" if self.vocabulary else f"hidden states of width {self.width}"
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            remedy = "correct forward, or declare x by OwnModule(module, vocabulary=V) or OwnModule(module, width=E)"
            raise ValueError(f"{self.where}: expected {CALL} with x as {takes}, got {found}; {remedy}") from error
        finally:
            hook.remove()
        self._check_calls(given, calls)
        return self._check_made(made, calls[0][1][1])

    def _arguments(self) -> Tuple[Any, ...]:
        """Return the arguments of a first call, with empty caches."""
        inner = self.inner
        x = torch.zeros(BATCH, LENGTH, dtype=torch.int64) if self.vocabulary else torch.ones(BATCH, LENGTH, self.width)
        positions = torch.arange(LENGTH).clamp(max=inner.config.max_positions - 1).repeat(BATCH, 1)
        coordinates = positions.expand(inner.axes, -1, -1) if inner.axes else positions
        carried = [*inner.token_encoding.embed_states(), *(state for attention in inner.attentions() for state in attention.states())]
        sizes = [(state.sizes[0], 0, state.sizes[1]) if state.grows else state.sizes for state in carried]
        dtypes = [getattr(torch, state.dtype or "float32") for state in carried]
        states = [torch.zeros(BATCH, *size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
        return x, positions, coordinates, positions, torch.zeros(BATCH, dtype=torch.int64), states

    def _check_calls(self, given: Tuple[Any, ...], calls: List[Any]) -> None:
        if len(calls) != 1:
            raise ValueError(f"{self.where}: expected forward to call the block once, got {len(calls)} calls; call it once")
        names = CALL[len("forward(") : -1].split(", ")
        handed = calls[0][0]
        if len(handed) != len(given):
            rule = f"{self.where}: expected the block to be called with {', '.join(names)} as positional arguments"
            raise ValueError(f"{rule}, got {len(handed)} positional arguments; pass all of them by position")
        for name, one, other in list(zip(names, given, handed, strict=True))[1:]:
            if one is not other:
                raise ValueError(f"{self.where}: expected {name} to be passed to the block unchanged, got another value; pass on the argument of forward")

    def _check_made(self, made: Any, states: List[Tensor]) -> int:
        rule = f"{self.where}: expected forward to return an output [B,S,N] and the states from the block"
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], Tensor) or not isinstance(made[1], (list, tuple)):
            raise ValueError(f"{rule}, got {type(made).__name__}; return output, states")
        output, returned = made
        if output.dim() != 3 or output.shape[:2] != (BATCH, LENGTH) or output.dtype != torch.float32:
            found = f"an output {list(output.shape)} of {str(output.dtype).removeprefix('torch.')} for B={BATCH}, S={LENGTH}"
            raise ValueError(f"{rule}, got {found}; return N numbers in float32 for each token")
        if len(returned) != len(states) or any(one is not other for one, other in zip(returned, states, strict=True)):
            raise ValueError(f"{rule}, got other states; return the states from the block unchanged")
        return output.size(2)
