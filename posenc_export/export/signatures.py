"""The two calling conventions of an artefact, positions or mask, around the same model.

Shapes: B batch, S new tokens, P past, T = P + S, E width, A coordinates, R tokens whose logits are wanted, V vocabulary.
"""

from typing import List, Tuple

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.models.own import Model
from posenc_export.models.stack import Stack


class PositionSignature(torch.nn.Module):
    """Native: position_ids, of A axes [1+A,B,S], the place in the sequence (-1 padding), then the coordinates; and the key positions of the cache as a state."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.axes = model, model.axes

    def forward(self, x: Tensor, position_ids: Tensor, past_positions: Tensor, states: List[Tensor]) -> Tuple[Tensor, Tensor, List[Tensor]]:
        """x [B,S] int64 or [B,S,E], position_ids [B,S] or [1+A,B,S], past_positions [B,P] int64, states in layer order to output, key positions, states."""
        places, coordinates = places_of(position_ids, self.axes)
        write_index = ops.write_index(past_positions.ge(0).sum(1), places)
        key_positions = ops.append_positions(past_positions, places, write_index)
        output, present = self.model(x, places, coordinates, key_positions, write_index, states)
        return output, key_positions, present


class LogitsSignature(torch.nn.Module):
    """As PositionSignature, for decoders: logits of the tokens at the columns logits_index alone."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.model, self.axes = model, model.axes

    def forward(
        self, x: Tensor, position_ids: Tensor, logits_index: Tensor, past_positions: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, Tensor, List[Tensor]]:
        """logits_index [B,R] int64, the rest as PositionSignature.forward, to logits [B,R,V], key positions, states."""
        places, coordinates = places_of(position_ids, self.axes)
        write_index = ops.write_index(past_positions.ge(0).sum(1), places)
        key_positions = ops.append_positions(past_positions, places, write_index)
        output, present = self.model(x, places, coordinates, key_positions, write_index, states, None, logits_index)
        return output, key_positions, present


class CallSignature(torch.nn.Module):
    """Native, for models without a cache of keys: position_ids alone. Theirs are the keys of the call, or none."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.axes = model, model.axes

    def forward(self, x: Tensor, position_ids: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] int64 or [B,S,E], position_ids [B,S] or [1+A,B,S], states in layer order to output, states."""
        places, coordinates = places_of(position_ids, self.axes)
        output, present = self.model(x, places, coordinates, places, torch.zeros_like(places[:, 0]), states)
        return output, present


class CallLogitsSignature(torch.nn.Module):
    """As CallSignature, for decoders: logits of the tokens at the columns logits_index alone."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.model, self.axes = model, model.axes

    def forward(self, x: Tensor, position_ids: Tensor, logits_index: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """logits_index [B,R] int64, the rest as CallSignature.forward, to logits [B,R,V], states."""
        places, coordinates = places_of(position_ids, self.axes)
        output, present = self.model(x, places, coordinates, places, torch.zeros_like(places[:, 0]), states, None, logits_index)
        return output, present


class MaskSignature(torch.nn.Module):
    """Hugging Face: attention_mask [B,T] (0 padding); positions count its ones, from 0."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.first_cache, self.cached = model, model.embed_states, has_cache(model)

    def forward(self, x: Tensor, attention_mask: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] int64 or [B,S,E], attention_mask [B,T] int64, states in layer order to output, states."""
        counted = counted_from(attention_mask)
        past = attention_mask.size(1) - x.size(1)
        positions = counted[:, past:]
        write_index = ops.write_index(torch.full_like(counted[:, 0], past), positions)
        if self.cached:
            counted = ops.fit_positions(counted, states[self.first_cache], positions)
        output, present = self.model(x, positions, positions, counted, write_index, states)
        return output, present


class SegmentSignature(torch.nn.Module):
    """Native, for models with segments: token_type_ids beside the tokens, and position_ids. No states."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.model, self.axes = model, model.axes

    def forward(self, x: Tensor, token_type_ids: Tensor, position_ids: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """x, token_type_ids [B,S] int64, position_ids [B,S] or [1+A,B,S], no states to output, no states."""
        places, coordinates = places_of(position_ids, self.axes)
        return self.model(x, places, coordinates, places, torch.zeros_like(places[:, 0]), states, token_type_ids)


class SegmentMaskSignature(torch.nn.Module):
    """Hugging Face, for models with segments: input_ids, token_type_ids and attention_mask [B,S]; positions count its ones, from 0."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, token_type_ids: Tensor, attention_mask: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """x, token_type_ids, attention_mask [B,S] int64, no states to output, no states."""
        positions = counted_from(attention_mask)
        return self.model(x, positions, positions, positions, torch.zeros_like(positions[:, 0]), states, token_type_ids)


NAMES = ("positions", "mask")


def places_of(position_ids: Tensor, axes: int) -> Tuple[Tensor, Tensor]:
    """position_ids [B,S] or [1+A,B,S] to places in the sequence [B,S], and to coordinates: the same, or [A,B,S]."""
    if axes > 0:
        return position_ids[0], position_ids[1:]
    return position_ids, position_ids


def counted_from(attention_mask: Tensor) -> Tensor:
    """Positions [B,T] int64 of the ones of a mask [B,T], from 0; -1 elsewhere."""
    return (attention_mask.cumsum(1) - 1).masked_fill(attention_mask.eq(0), -1)


def has_cache(model: Model) -> bool:
    """Whether keys are kept from call to call."""
    return any(carried.grows for attention in model.attentions() for carried in attention.states())


def has_segments(model: Model) -> bool:
    """Whether token types are read beside the tokens."""
    return isinstance(model, Stack) and model.segments > 0


def takes_logits_index(model: Model, signature: str) -> bool:
    """Whether the graph is told which logits are wanted: decoders that read one token behind the other. Programs that feed an attention_mask know no such input."""
    return signature == "positions" and isinstance(model, Stack) and model.config.head is not None and model.config.token_geometry.causal


def wrap(model: Model, signature: str) -> torch.nn.Module:
    """The model in a calling convention, in eval mode.

    Raises:
        ValueError: attention_mask for an encoding with coordinates of its own.
    """
    for encoding in dict.fromkeys((model.token_encoding, *(attention.encoding for attention in model.attentions()))):
        encoding.prepare()
    if signature == "mask" and model.axes:
        raise ValueError(f"export: signature mask counts positions, got an encoding of {model.axes} coordinates; choose signature positions")
    if isinstance(model, Stack) and model.segments:
        return (SegmentSignature(model) if signature == "positions" else SegmentMaskSignature(model)).eval()
    if signature == "mask":
        return MaskSignature(model).eval()
    if isinstance(model, Stack) and takes_logits_index(model, signature):
        return (LogitsSignature(model) if has_cache(model) else CallLogitsSignature(model)).eval()
    return (PositionSignature(model) if has_cache(model) else CallSignature(model)).eval()
