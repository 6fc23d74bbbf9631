"""The two calling conventions of an artefact, around the same model.

Shapes: B batch, S new tokens, P past, T = P + S, E width.
"""

from typing import List, Tuple, Union

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.models.attention import AttentionBlock
from posenc_export.models.decoder import Decoder

Model = Union[Decoder, AttentionBlock]


class PositionSignature(torch.nn.Module):
    """Native: position_ids [B,S] (-1 padding) and the key positions of the cache as a state."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, position_ids: Tensor, past_positions: Tensor, states: List[Tensor]) -> Tuple[Tensor, Tensor, List[Tensor]]:
        """x [B,S] int64 or [B,S,E], position_ids [B,S], past_positions [B,P] int64, states in layer order to output, key positions, states."""
        write_index = past_positions.ge(0).sum(1)
        key_positions = ops.append_positions(past_positions, position_ids, write_index)
        output, present = self.model(x, position_ids, position_ids, key_positions, write_index, states)
        return output, key_positions, present


class GridSignature(torch.nn.Module):
    """Native, for encodings of A axes: position_ids [1+A,B,S], the place in the sequence (-1 padding), then the coordinates."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, position_ids: Tensor, past_positions: Tensor, states: List[Tensor]) -> Tuple[Tensor, Tensor, List[Tensor]]:
        """As PositionSignature.forward."""
        places = position_ids[0]
        write_index = past_positions.ge(0).sum(1)
        key_positions = ops.append_positions(past_positions, places, write_index)
        output, present = self.model(x, places, position_ids[1:], key_positions, write_index, states)
        return output, key_positions, present


class MaskSignature(torch.nn.Module):
    """Hugging Face: attention_mask [B,T] (0 padding); positions count its ones, from 0."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.first_cache = model, model.embed_states

    def forward(self, x: Tensor, attention_mask: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] int64 or [B,S,E], attention_mask [B,T] int64, states in layer order to output, states."""
        counted = (attention_mask.cumsum(1) - 1).masked_fill(attention_mask.eq(0), -1)
        past = attention_mask.size(1) - x.size(1)
        positions = counted[:, past:]
        write_index = torch.full_like(counted[:, 0], past)
        output, present = self.model(x, positions, positions, ops.fit_positions(counted, states[self.first_cache], positions), write_index, states)
        return output, present


NAMES = ("positions", "mask")


def wrap(model: Model, signature: str) -> torch.nn.Module:
    """The model in a calling convention, in eval mode.

    Raises:
        ValueError: attention_mask for an encoding with coordinates of its own.
    """
    if signature == "positions":
        return (GridSignature(model) if model.encoding.axes else PositionSignature(model)).eval()
    if model.encoding.axes:
        raise ValueError(f"export: signature mask counts positions, got an encoding of {model.encoding.axes} coordinates; choose signature positions")
    return MaskSignature(model).eval()
