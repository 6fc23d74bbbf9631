"""Whether a module of the user's own has the form that OwnModule asks for, found by one call."""

from typing import Any, List, Tuple, Union

import torch
from torch import Tensor

from posenc_export.models.block import AttentionBlock
from posenc_export.models.stack import Stack

Inner = Union[AttentionBlock, Stack]
CALL = "forward(x, positions, coordinates, key_positions, write_index, states)"
BATCH, LENGTH = 2, 3  # of the call


def only_inner(module: torch.nn.Module, where: str) -> Inner:
    """The block or stack in a module.

    Raises:
        ValueError: none, or several.
    """
    found = [part for part in module.modules() if isinstance(part, (AttentionBlock, Stack))]
    if len(found) != 1:
        remedy = "describe all layers as one Stack" if found else "put one into it"
        raise ValueError(f"{where}: expected one AttentionBlock or Stack in it, got {len(found) or 'none'}; {remedy}")
    return found[0]


class Trial:
    """One call of a module on empty caches, watched where it calls its block.

    Args:
        where: for messages.
        module: in eval mode, with one block or stack in it.
        vocabulary: x is token ids below it; hidden states where 0.
        width: of the hidden states.
    """

    def __init__(self, where: str, module: torch.nn.Module, vocabulary: int, width: int) -> None:
        self.where, self.module, self.vocabulary, self.width = where, module, vocabulary, width
        self.inner = only_inner(module, where)

    def outputs(self) -> int:
        """Numbers N that the module gives for each token.

        Raises:
            ValueError: a forward of another form.
        """
        calls: List[Any] = []
        given = self._given()
        hook = self.inner.register_forward_hook(lambda _, arguments, made: calls.append((arguments, made)))
        try:
            with torch.no_grad():
                made = self.module(*given)
        except (IndexError, RuntimeError, TypeError) as error:
            takes = f"token ids below {self.vocabulary}" if self.vocabulary else f"hidden states of width {self.width}"
            said = " ".join(str(error).split())[:300]
            remedy = "or say what x is by OwnModule(module, vocabulary=V) or OwnModule(module, width=E)"
            raise ValueError(f"{self.where}: expected {CALL}, x being {takes}, got {type(error).__name__}: {said}; write it so, {remedy}") from error
        finally:
            hook.remove()
        self._check_calls(given, calls)
        return self._check_made(made, calls[0][1][1])

    def _given(self) -> Tuple[Any, ...]:
        """Arguments of a first call, on empty caches."""
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
            raise ValueError(f"{self.where}: expected one call of its block in forward, got {len(calls)}; call it once")
        names = CALL[len("forward(") : -1].split(", ")
        handed = calls[0][0]
        if len(handed) != len(given):
            raise ValueError(f"{self.where}: expected the block to be called with {', '.join(names)}, all by position, got {len(handed)} of them; write it so")
        for name, one, other in list(zip(names, given, handed, strict=True))[1:]:
            if one is not other:
                raise ValueError(f"{self.where}: expected {name} to reach the block as they came, got other ones; hand them on unread")

    def _check_made(self, made: Any, states: List[Tensor]) -> int:
        rule = f"{self.where}: expected an output [B,S,N] and the states that the block gave"
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], Tensor) or not isinstance(made[1], (list, tuple)):
            raise ValueError(f"{rule}, got {type(made).__name__}; return output, states")
        output, returned = made
        if output.dim() != 3 or output.shape[:2] != (BATCH, LENGTH) or output.dtype != torch.float32:
            found = f"an output {list(output.shape)} of {str(output.dtype).removeprefix('torch.')} for B={BATCH}, S={LENGTH}"
            raise ValueError(f"{rule}, got {found}; give N numbers in float32 for each token")
        if len(returned) != len(states) or any(one is not other for one, other in zip(returned, states, strict=True)):
            raise ValueError(f"{rule}, got other states; return those of the block as they are")
        return output.size(2)
