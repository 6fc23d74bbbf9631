"""The two calling conventions of an artefact, around the same model.

Shapes: B batch, S new tokens, P past, T = P + S, E width.
"""

from typing import List, Tuple

import torch
from torch import Tensor

from posenc_export import ops


class PositionSignature(torch.nn.Module):
    """Native: position_ids [B,S] (-1 padding) and the key positions of the cache as a state."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, position_ids: Tensor, past_positions: Tensor, states: List[Tensor]) -> Tuple[Tensor, Tensor, List[Tensor]]:
        """x [B,S] int64 or [B,S,E], position_ids [B,S], past_positions [B,P] int64, states in layer order to output, key positions, states."""
        write_index = past_positions.ge(0).sum(1)
        key_positions = ops.append_positions(past_positions, position_ids, write_index)
        output, present = self.model(x, position_ids, key_positions, write_index, states)
        return output, key_positions, present


class MaskSignature(torch.nn.Module):
    """Hugging Face: attention_mask [B,T] (0 padding); positions count its ones, from 0."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, attention_mask: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] int64 or [B,S,E], attention_mask [B,T] int64, states in layer order to output, states."""
        counted = (attention_mask.cumsum(1) - 1).masked_fill(attention_mask.eq(0), -1)
        past = attention_mask.size(1) - x.size(1)
        positions = counted[:, past:]
        write_index = torch.full_like(counted[:, 0], past)
        output, present = self.model(x, positions, ops.fit_positions(counted, states[0], positions), write_index, states)
        return output, present


SIGNATURES = {"positions": PositionSignature, "mask": MaskSignature}
