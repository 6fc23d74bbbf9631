"""Wrap a model in one of the two calling conventions of artefacts, "positions" or "mask".

Shapes: B batch, S new tokens, P past, T = P + S, E width, A coordinates per token, R tokens whose
logits are computed, V vocabulary.
"""

from typing import List, Tuple, Type

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.combined import overrides, parts_of
from posenc_export.export.read_module import Model, ReadModule
from posenc_export.models.block import AttentionBlock
from posenc_export.models.whole_pass import encodings_in
from posenc_export.shared.refusal import refusal


class Signature(torch.nn.Module):
    """A model in a calling convention; a subclass has one list of arguments for TorchScript."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.axes, self.with_position = model, model.axes, model.with_position
        self.first_cache, self.cached = model.embed_states, has_cache(model)


class PositionSignature(Signature):
    """Signature "positions": position_ids is an input, and the key positions of the cache are a
    state.

    position_ids [B,S] are places in the sequence, -1 for padding. Encodings with A coordinates take
    [1+A,B,S]: the places, then the coordinates.
    """

    def forward(
        self, x: Tensor, position_ids: Tensor, past_positions: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, Tensor, List[Tensor]]:
        """Take x [B,S] int64 or [B,S,E], position_ids [B,S] or [1+A,B,S], past_positions [B,P]
        int64 and states in layer order; return output, key positions, states.
        """
        places, coordinates = places_of(position_ids, self.axes, self.with_position)
        write_index = ops.write_index(past_positions.ge(0).sum(1), places)
        key_positions = ops.append_positions(past_positions, places, write_index)
        output, present = self.model(x, places, coordinates, key_positions, write_index, states)
        return output, key_positions, present


class LogitsSignature(Signature):
    """PositionSignature for decoders, with logits of the tokens logits_index only."""

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        logits_index: Tensor,
        past_positions: Tensor,
        states: List[Tensor],
    ) -> Tuple[Tensor, Tensor, List[Tensor]]:
        """logits_index [B,R] int64; return logits [B,R,V], key positions, states."""
        places, coordinates = places_of(position_ids, self.axes, self.with_position)
        write_index = ops.write_index(past_positions.ge(0).sum(1), places)
        key_positions = ops.append_positions(past_positions, places, write_index)
        output, present = self.model(
            x, places, coordinates, key_positions, write_index, states, None, logits_index
        )
        return output, key_positions, present


class CallSignature(Signature):
    """Signature "positions" without cached keys: attention reads the keys of the call."""

    def forward(
        self, x: Tensor, position_ids: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] or [B,S,E], position_ids [B,S] or [1+A,B,S], states; return output, states."""
        places, coordinates = places_of(position_ids, self.axes, self.with_position)
        first = torch.zeros_like(places[:, 0])
        output, present = self.model(x, places, coordinates, places, first, states)
        return output, present


class CallLogitsSignature(Signature):
    """CallSignature for decoders, with logits of the tokens logits_index only."""

    def forward(
        self, x: Tensor, position_ids: Tensor, logits_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """logits_index [B,R] int64; return logits [B,R,V], states."""
        places, coordinates = places_of(position_ids, self.axes, self.with_position)
        first = torch.zeros_like(places[:, 0])
        output, present = self.model(
            x, places, coordinates, places, first, states, None, logits_index
        )
        return output, present


class MaskSignature(Signature):
    """Signature "mask": attention_mask [B,T] is 1 for tokens, and 0 or -1 for others. Positions
    count the tokens of a row; windows, chunks and biases count the zeros between them too, as
    transformers does, or the graph refuses such zeros.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.by_slot, self.refuses = counts_slots(model), refuses_gaps(model)

    def forward(
        self, x: Tensor, attention_mask: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] or [B,S,E], attention_mask [B,T] int64, states; return output, states."""
        counted = counted_from(attention_mask)
        places = places_from(attention_mask, counted, self.by_slot, self.refuses)
        past = attention_mask.size(1) - x.size(1)
        queries = places[:, past:]
        # Bidirectional models of transformers count columns wherever they count distances.
        positions = counted[:, past:] if self.by_slot and self.cached else queries
        write_index = ops.write_index(torch.full_like(places[:, 0], past), queries)
        if self.cached:
            places = ops.fit_positions(places, states[self.first_cache], queries)
        output, present = self.model(x, queries, positions, places, write_index, states)
        return output, present


class SegmentSignature(Signature):
    """CallSignature for models with token types, an input, and without states."""

    def forward(
        self, x: Tensor, token_type_ids: Tensor, position_ids: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x, token_type_ids [B,S], position_ids [B,S] or [1+A,B,S] int64."""
        places, coordinates = places_of(position_ids, self.axes, self.with_position)
        first = torch.zeros_like(places[:, 0])
        return self.model(x, places, coordinates, places, first, states, token_type_ids)


class SegmentMaskSignature(Signature):
    """MaskSignature for models with token types, without states."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.by_slot, self.refuses = counts_slots(model), refuses_gaps(model)

    def forward(
        self, x: Tensor, token_type_ids: Tensor, attention_mask: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x, token_type_ids, attention_mask [B,S] int64; return output, []."""
        counted = counted_from(attention_mask)
        positions = places_from(attention_mask, counted, self.by_slot, self.refuses)
        first = torch.zeros_like(positions[:, 0])
        return self.model(x, positions, positions, positions, first, states, token_type_ids)


NAMES = ("positions", "mask")


def places_of(position_ids: Tensor, axes: int, with_position: bool) -> Tuple[Tensor, Tensor]:
    """Split position_ids into places [B,S] and coordinates [A,B,S], which are all of it without
    axes, and for a model that reads the places too.
    """
    if torch.jit.is_scripting():
        # Layers look up the same rows. TorchScript merges equal operations only on tensors that no
        # write to a cache changes, and inputs may share memory.
        position_ids = position_ids.clone()
    if axes > 0:
        return position_ids[0], position_ids if with_position else position_ids[1:]
    return position_ids, position_ids


def counted_from(attention_mask: Tensor) -> Tensor:
    """Return positions [B,T] int64 that count the ones of a mask from 0, -1 at others."""
    return (attention_mask.clamp(min=0).cumsum(1) - 1).masked_fill(attention_mask.le(0), -1)


def places_from(attention_mask: Tensor, counted: Tensor, by_slot: bool, refuses: bool) -> Tensor:
    """Return the places [B,T] int64 that distances are taken of: `counted` or, by_slot, the columns
    from the first token on that are not -1. refuses: fail if the two differ.
    """
    if not by_slot and not refuses:
        return counted
    begun = attention_mask.clamp(min=0).cumsum(1).gt(0) & attention_mask.ge(0)
    places = (begun.to(torch.int64).cumsum(1) - 1).masked_fill(attention_mask.le(0), -1)
    return places + ops.refuse_gaps((places - counted).sum()) if refuses else places


def counts_slots(model: Model) -> bool:
    """Return whether a layer counts distances between tokens: windows, chunks, biases of scores."""
    rules = [getattr(attention, "visibility", None) for attention in model.attentions()]
    if any(rule and (rule.before >= 0 or rule.after > 0 or rule.chunk) for rule in rules):
        return True
    parts = [part for encoding in encodings_in(model) for part in parts_of(encoding)]
    return any(overrides(part, "bias") for part in parts)


def refuses_gaps(model: Model) -> bool:
    """Return whether zeros between ones of a mask have no exact meaning: encodings with a state
    of tokens, and rotations of cached keys with windows.
    """
    if isinstance(model, ReadModule):  # whether it counts them is not known
        return True
    encodings = encodings_in(model)
    turns = counts_slots(model) and any(overrides(e, "rescore") for e in encodings)
    return turns or any(overrides(e, "embed_next") for e in encodings)


def has_cache(model: Model) -> bool:
    """Return whether the model caches keys."""
    return any(carried.grows for attention in model.attentions() for carried in attention.states())


def has_segments(model: Model) -> bool:
    """Return whether the model reads token types."""
    return not isinstance(model, AttentionBlock) and model.segments > 0


def takes_logits_index(model: Model, signature: str) -> bool:
    """Return whether the graph has the input logits_index: causal decoders with signature
    "positions". Programs that feed an attention_mask do not know this input.
    """
    if signature != "positions" or isinstance(model, AttentionBlock):
        return False
    if isinstance(model, ReadModule):
        return model.config.decodes and model.takes_index
    return model.config.head is not None and model.config.token_geometry.causal


def wrap(model: Model, signature: str) -> torch.nn.Module:
    """Return the model in a calling convention, for eval. ValueError: "mask" with coordinates."""
    for encoding in encodings_in(model):
        encoding.prepare()
    if signature == "mask" and model.axes:
        rule = "an encoding without coordinates for signature mask"
        raise refusal("export", rule, f"one with {model.axes}", "choose signature positions")
    if has_segments(model):
        kind: Type[Signature] = SegmentMaskSignature if signature == "mask" else SegmentSignature
    elif signature == "mask":
        kind = MaskSignature
    elif takes_logits_index(model, signature):
        kind = LogitsSignature if has_cache(model) else CallLogitsSignature
    else:
        kind = PositionSignature if has_cache(model) else CallSignature
    return kind(model).eval()
