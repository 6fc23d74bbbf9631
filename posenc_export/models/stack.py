"""Decoders and encoders: tokens, layers and a head, built from a description."""

import json
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.models.config import StackConfig
from posenc_export.models.embedding_and_head import Head, Text, Tokens
from posenc_export.models.layer import Layer, shared_masks
from posenc_export.models.parts import build
from posenc_export.models.whole_pass import Whole
from posenc_export.ops import TokenPlaces
from posenc_export.shared.refusal import refusal


class Stack(Whole):
    """A model that maps token ids to logits, or without a head to hidden states.

    Args:
        config: description of the model.

    Raises:
        ValueError: a tied head with a token table of another width, encodings at a place where they
            have no effect.
    """

    __jit_ignored_attributes__ = ["text"]

    def __init__(self, config: StackConfig) -> None:
        on_tokens, *built = _encodings(config)
        super().__init__(config, on_tokens, built)
        self.text = Text()
        width, kinds = config.width, config.kinds
        self.tokens: Any = Tokens(config.width, config.tokens, on_tokens)
        pairs = zip(kinds, built, strict=True)
        self.layers = torch.nn.ModuleList(Layer(width, kind, own) for kind, own in pairs)
        self.norm = build("norm", config.norm or {"name": "none"}, width)
        self.head = self._build_head()
        self.masks, self.mask_of = shared_masks(kinds, built)
        self.layer_states = [len(attention.states()) for attention in self.attentions()]

    def _build_head(self) -> torch.nn.Module:
        config = self.config.head
        if config is None:
            return torch.nn.Identity()
        table = self.tokens.embedding.weight
        if config.tied and table.size(1) != self.config.width:
            rule = f"a token table of the model's width {self.config.width} for a tied head"
            raise refusal("decoder", rule, table.size(1), "set tied=False")
        return Head(self.config.width, table.size(0), table if config.tied else None)

    def forward(
        self,
        x: Tensor,
        places: TokenPlaces,
        states: list[Tensor],
        logits_index: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """x [B,S] int64, other inputs as for AttentionBlock.forward, to logits [B,S,V] or hidden
        states [B,S,E], and new states.

        Args:
            states: states of the token encoding, then of each layer.
            logits_index: columns [B,R] int64 of the tokens whose logits [B,R,V] are returned; None
                for all tokens.
        """
        x, present = self.tokens(x, places.coordinates, states[: self.embed_states])  # [B,S,E]
        masks: list[Tensor] = []  # that layers share [B,1 or H,S,T]
        for mask in self.masks:
            masks.append(mask(places, x))
        first = self.embed_states
        for index, layer in enumerate(self.layers):
            end = first + self.layer_states[index]
            seen = masks[self.mask_of[index]]
            x, new_states = layer(x, places, seen, states[first:end])  # [B,S,E]
            present, first = present + new_states, end
        if logits_index is not None:
            x = ops.select_tokens(x, logits_index)  # [B,R,E]
        x = self.norm(x)
        return self.head(x), present  # [B,R,V]

    def attentions(self) -> list[Any]:
        """Return the attention of each layer."""
        return [layer.attention for layer in self.layers]

    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any]) -> np.ndarray:
        """One row of ids [n] to [n,V] or [n,E], float64."""
        rows = self.tokens.exact(x, places)
        for layer in self.layers:
            rows = layer.exact(rows, positions, places)  # type: ignore[operator]
        rows = self.norm.exact(rows)
        if isinstance(self.head, torch.nn.Identity):
            return rows
        return np.asarray(self.head.exact(rows))  # type: ignore[operator]


def _encodings(config: StackConfig) -> list[PositionEncoding]:
    """Build the encoding of tokens and of each layer. Equal specifications share one."""
    shared: dict[tuple[str, Geometry], PositionEncoding] = {}
    built: list[PositionEncoding] = []
    places = [(config.tokens.encodings, config.token_geometry)]
    for attention in config.attentions:
        geometry = attention.geometry(config.width, config.max_positions)
        places.append((attention.encodings, geometry))
    for specs, geometry in places:
        key = (json.dumps(specs, sort_keys=True), geometry)
        built.append(shared.get(key) or encodings.build_all(specs, geometry))
        if built[-1].shared:
            shared[key] = built[-1]
    return built
