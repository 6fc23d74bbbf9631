"""Wrap a model in one of the two calling conventions of artefacts, "positions" or "mask".

Shapes: B batch, S new tokens, P past, T = P + S, E width, A coordinates per token, R tokens whose
logits are computed, V vocabulary.
"""

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.export.read_module import Model, ReadModule
from posenc_export.models.block import AttentionBlock
from posenc_export.models.whole_pass import encodings_in
from posenc_export.ops import TokenPlaces
from posenc_export.shared.refusal import refusal


class Signature(torch.nn.Module):
    """A model in a calling convention. Subclasses have fixed lists of arguments for TorchScript."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.axes, self.with_position = model, model.axes, model.with_position
        self.first_cache, self.cached = model.embed_states, has_cache(model)

    def places(self, position_ids: Tensor, past_positions: Tensor | None = None) -> TokenPlaces:
        """Return the places of tokens at position_ids [B,S], or [1+A,B,S] with coordinates, after
        those in the cache [B,P]; None for the keys of the call alone.
        """
        if torch.jit.is_scripting():
            # Layers look up the same rows. TorchScript only merges equal operations on tensors that
            # cannot share memory with a cache that is written; inputs might.
            position_ids = position_ids.clone()
        positions, coordinates = position_ids, position_ids
        if self.axes > 0:
            positions = position_ids[0]
            coordinates = position_ids if self.with_position else position_ids[1:]
        if past_positions is None:
            first = torch.zeros_like(positions[:, 0])
            return TokenPlaces(positions, coordinates, positions, first)
        write_index = ops.write_index(past_positions.ge(0).sum(1), positions)
        key_positions = ops.append_positions(past_positions, positions, write_index)
        return TokenPlaces(positions, coordinates, key_positions, write_index)


class PositionSignature(Signature):
    """Signature "positions": position_ids is an input, and the key positions of the cache are a
    state.

    position_ids [B,S] are places in the sequence, -1 for padding. Encodings with A coordinates take
    [1+A,B,S]: the places, then the coordinates.
    """

    def forward(
        self, x: Tensor, position_ids: Tensor, past_positions: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Take x [B,S] int64 or [B,S,E], position_ids [B,S] or [1+A,B,S], past_positions [B,P]
        int64 and states in layer order; return output, key positions, states.
        """
        places = self.places(position_ids, past_positions)
        output, present = self.model(x, places, states)
        return output, places.key_positions, present


class LogitsSignature(Signature):
    """PositionSignature for decoders, with logits of the tokens logits_index only."""

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        logits_index: Tensor,
        past_positions: Tensor,
        states: list[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """logits_index [B,R] int64; return logits [B,R,V], key positions, states."""
        places = self.places(position_ids, past_positions)
        output, present = self.model(x, places, states, logits_index)
        return output, places.key_positions, present


class CallSignature(Signature):
    """Signature "positions" without cached keys: attention reads the keys of the call."""

    def forward(
        self, x: Tensor, position_ids: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """x [B,S] or [B,S,E], position_ids [B,S] or [1+A,B,S], states; return output, states."""
        return self.model(x, self.places(position_ids), states)


class CallLogitsSignature(Signature):
    """CallSignature for decoders, with logits of the tokens logits_index only."""

    def forward(
        self, x: Tensor, position_ids: Tensor, logits_index: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """logits_index [B,R] int64; return logits [B,R,V], states."""
        return self.model(x, self.places(position_ids), states, logits_index)


class MaskSignature(Signature):
    """Signature "mask": attention_mask [B,T] is 1 for tokens, and 0 or -1 for others. Positions
    count the tokens of a row. The graph refuses zeros between them.
    """

    def forward(
        self, x: Tensor, attention_mask: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """x [B,S] or [B,S,E], attention_mask [B,T] int64, states; return output, states."""
        keys = positions_of(attention_mask)
        past = attention_mask.size(1) - x.size(1)
        own = keys[:, past:]
        write_index = ops.write_index(torch.full_like(keys[:, 0], past), own)
        if self.cached:
            keys = ops.fit_positions(keys, states[self.first_cache], own)
        return self.model(x, TokenPlaces(own, own, keys, write_index), states)


class SegmentSignature(Signature):
    """CallSignature for models with token types, an input, and without states."""

    def forward(
        self, x: Tensor, token_type_ids: Tensor, position_ids: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """x, token_type_ids [B,S], position_ids [B,S] or [1+A,B,S] int64."""
        return self.model(x, self.places(position_ids), states, None, token_type_ids)


class SegmentMaskSignature(Signature):
    """MaskSignature for models with token types, without states."""

    def forward(
        self, x: Tensor, token_type_ids: Tensor, attention_mask: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """x, token_type_ids, attention_mask [B,S] int64; return output, []."""
        places = self.places(positions_of(attention_mask))
        return self.model(x, places, states, None, token_type_ids)


NAMES = ("positions", "mask")


def positions_of(attention_mask: Tensor) -> Tensor:
    """Return positions [B,T] int64 that count the ones of a mask from 0; -1 at others. Fails for a
    zero between ones, which some models would count in distances and others would not.
    """
    ones = attention_mask.clamp(min=0).cumsum(1)
    between = (ones * (ones[:, -1:] - ones)).masked_fill(attention_mask.ne(0), 0)
    counted = (ones - 1).masked_fill(attention_mask.le(0), -1)
    return counted + ops.refuse_gaps(between.sum())


def has_cache(model: Model) -> bool:
    """Return whether the model caches keys."""
    return any(carried.grows for attention in model.attentions() for carried in attention.states())


def has_segments(model: Model) -> bool:
    """Return whether the model reads token types."""
    return isinstance(model, ReadModule) and model.segments > 0


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
        kind: type[Signature] = SegmentMaskSignature if signature == "mask" else SegmentSignature
    elif signature == "mask":
        kind = MaskSignature
    elif takes_logits_index(model, signature):
        kind = LogitsSignature if has_cache(model) else CallLogitsSignature
    else:
        kind = PositionSignature if has_cache(model) else CallSignature
    return kind(model).eval()
