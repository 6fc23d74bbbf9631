"""Tokens, layers and a head, as a description has them: decoders and encoders of every family."""

import json
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.encodings.base import Geometry, PositionEncoding
from posenc_export.encodings.together import acts, axes_of
from posenc_export.models.attention import attention, check_works
from posenc_export.models.config import LayerConfig, StackConfig
from posenc_export.models.ends import Features, Head, KeyValues, Text, Tokens
from posenc_export.models.parts import PARTS, build


class Shelf:
    """Encodings of a model by what they are: what layers can share is there once, with one table."""

    def __init__(self) -> None:
        self._made: Dict[Tuple[str, Geometry], PositionEncoding] = {}

    def take(self, specs: Sequence[Dict[str, Any]], geometry: Geometry) -> PositionEncoding:
        """The encoding that `specs` describe, the same again where it can be shared.

        Raises:
            ValueError: as encodings.build_all.
        """
        key = (json.dumps(specs, sort_keys=True), geometry)
        made = self._made.get(key) or encodings.build_all(specs, geometry)
        if made.shared:
            self._made[key] = made
        return made


class Mask(torch.nn.Module):
    """What queries see, with the bias of an encoding: made once for all layers that have the same.

    Args:
        sight: of parts/sight.py.
        encoding: its `bias` is added.
    """

    def __init__(self, sight: Any, encoding: PositionEncoding) -> None:
        super().__init__()
        self.before, self.after, self.chunk, self.encoding = sight.before, sight.after, sight.chunk, encoding

    def forward(self, positions: Tensor, key_positions: Tensor, like: Tensor) -> Tensor:
        """positions [B,S], key_positions [B,T] int64 to [B,1 or H,S,T] in like's dtype."""
        return ops.attention_mask(positions, key_positions, self.encoding.bias(positions, key_positions), like, self.before, self.after, self.chunk)


class Layer(torch.nn.Module):
    """Attention and MLP with norms and sums around them.

    Args:
        width: model width E.
        kind: what it is made of.
        encoding: acts in its attention.

    Raises:
        ValueError: another number of norms than its residual needs.
    """

    def __init__(self, width: int, kind: LayerConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        norms = [build("norm", norm, width) for norm in kind.norms]
        needed = getattr(PARTS["residual"].get(kind.residual.get("name", "")), "COUNT", len(norms))
        if len(norms) != needed:
            raise ValueError(f"config: residual {kind.residual['name']} has {needed} norms, got {len(norms)}; give as many")
        self.residual = build("residual", kind.residual, norms)
        self.attention = attention(width, kind.attention, encoding)
        self.mlp = build("mlp", kind.mlp, width)

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor, mask: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """Shapes as Attention.forward."""
        y, present = self.attention(self.residual.attention_input(x), positions, coordinates, key_positions, mask, write_index, states)
        between = self.residual.after_attention(x, y)
        return self.residual.after_mlp(between, self.mlp(self.residual.mlp_input(x, between))), present

    def exact(
        self, x: np.ndarray, positions: range, places: Sequence[Any], types: Optional[np.ndarray] = None, encoded: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        """One row x [n,E] with token types [n] or none, and the keys and values of an encoder where it reads them [K,Q,D], to [n,E], float64."""
        attention: Any = self.attention
        given = encoded or (types,)
        return np.asarray(self.residual.exact(x, lambda read: attention.exact(read, positions, places, *given), self.mlp.exact))


class Stack(torch.nn.Module):
    """Token ids to logits; without a head to hidden states, or to keys and values for a decoder; without layers to embedded tokens.

    Args:
        config: the model's description.

    Raises:
        ValueError: a tied head where the token table is of another width, encodings at a place where they do not act, segments in a model with a cache.
    """

    __jit_ignored_attributes__ = ["text"]

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.source: Dict[str, Any] = {}  # how to build the same weights again, if there is a way (models.presets)
        self.text = Text()
        self.config = config
        width, kinds, shelf = config.width, config.kinds, Shelf()
        self.token_encoding = shelf.take(config.tokens.encodings, config.token_geometry)
        built = [shelf.take(kind.attention.encodings, kind.attention.geometry(width, config.max_positions)) for kind in kinds]
        check_places([self.token_encoding], built)
        check_works(self.token_encoding, config.token_geometry.causal)
        self.axes, self.segments = axes_of([self.token_encoding, *built]), config.tokens.segments
        self.tokens: Any = (Tokens if config.tokens.features is None else Features)(width, config.tokens, self.token_encoding)
        self.layers = torch.nn.ModuleList(Layer(width, kind, encoding) for kind, encoding in zip(kinds, built, strict=True))
        self.norm = build("norm", config.norm or {"name": "none"}, width)
        self.head = self._made_head()
        self.masks, self.mask_of = _masks(kinds, built)
        self.mask_of_encoder = [self.mask_of.index(index) in _readers(kinds) for index in range(len(self.masks))]
        self.embed_states = len(self.token_encoding.embed_states())
        self.layer_states = [len(layer.attention.states()) for layer in self.layers]  # type: ignore[union-attr,operator]
        self.kept_states = self.embed_states + sum(self.layer_states)
        self.reads_encoder = [index in _readers(kinds) for index in range(len(kinds))]
        if self.segments and any(self.layer_states):
            raise ValueError("config: segments belong to models without a cache, got them beside causal layers; leave them out")

    def _made_head(self) -> torch.nn.Module:
        config = self.config.head
        if config is None:
            return torch.nn.Identity() if self.config.key_values is None else KeyValues(self.config.width, self.config.key_values)
        table = self.tokens.embedding.weight
        if config.tied and table.size(1) != self.config.width:
            raise ValueError(f"decoder: a tied head needs a token table as wide as the model, got {table.size(1)} and {self.config.width}; set tied=False")
        return Head(self.config.width, table.size(0), config, table if config.tied else None)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        coordinates: Tensor,
        key_positions: Tensor,
        write_index: Tensor,
        states: List[Tensor],
        segments: Optional[Tensor] = None,
        logits_index: Optional[Tensor] = None,
    ) -> Tuple[Tensor, List[Tensor]]:
        """x and segments [B,S] int64, the rest as AttentionBlock.forward, to logits [B,S,V], hidden states [B,S,E] or keys and values [B,S,N], and new states.

        logits_index: columns [B,R] int64 of the tokens whose logits [B,R,V] are wanted; those of all where None.

        states: layer by layer; then, of a decoder that reads an encoder, the encoder's attention mask [B,Q] int64, and a key and a value [B,K,Q,D] for each
        layer that reads it. Those have no new values.
        """
        x, present = self.tokens(x, segments, coordinates, states[: self.embed_states])
        given = states[self.kept_states :]
        masks: List[Tensor] = []
        for index, mask in enumerate(self.masks):
            masks.append(mask(positions, given[0] - 1 if self.mask_of_encoder[index] else key_positions, x))
        first, next_given = self.embed_states, 1
        types = states[:0] if segments is None else [segments]  # for encodings of scores: where there are segments, layers have no states
        for index, layer in enumerate(self.layers):
            behind = first + self.layer_states[index]
            read = states[first:behind] + types
            if self.reads_encoder[index]:
                read, next_given = given[next_given : next_given + 2], next_given + 2
            x, carried = layer(x, positions, coordinates, key_positions, masks[self.mask_of[index]], write_index, read)
            present, first = present + carried, behind
        if logits_index is not None:
            x = ops.select_tokens(x, logits_index)
        return self.head(self.norm(x)), present

    @torch.jit.unused
    def attentions(self) -> List[Any]:
        """The attention of each layer."""
        return [layer.attention for layer in self.layers]

    def exact(
        self, x: np.ndarray, positions: range, places: Sequence[Any], segments: Optional[np.ndarray] = None, encoded: Optional[np.ndarray] = None
    ) -> np.ndarray:
        """One row of ids [n] at positions and coordinates, and what its encoder gave [Q,N], to [n,V], [n,E] or [n,N], float64."""
        rows = self.tokens.exact(x, segments, places)
        for layer, pair in zip(self.layers, _pairs(self.config.kinds, encoded), strict=True):
            rows = layer.exact(rows, positions, places, segments, pair)  # type: ignore[operator]
        rows = self.norm.exact(rows)
        return rows if isinstance(self.head, torch.nn.Identity) else np.asarray(self.head.exact(rows))  # type: ignore[operator]


def check_places(on_tokens: Sequence[PositionEncoding], in_layers: Sequence[PositionEncoding]) -> None:
    """Refuse encodings at a place where they do nothing of what they do.

    Raises:
        ValueError: the first of them.
    """
    for found, hooks, here, there in (
        (on_tokens, ("rotate", "bias", "observe", "rescore"), "on tokens", "in layers"),
        (in_layers, ("embed", "embed_next"), "in layers", "on tokens"),
    ):
        for one in found:
            if acts(one, *hooks):
                raise ValueError(f"config: encodings stand where they act, got {type(one).__name__} {here}; give it {there}")


def _readers(kinds: Sequence[LayerConfig]) -> List[int]:
    """Indices of the layers that read an encoder."""
    return [index for index, kind in enumerate(kinds) if kind.attention.reads_encoder]


def _pairs(kinds: Sequence[LayerConfig], encoded: Optional[np.ndarray]) -> List[List[np.ndarray]]:
    """For each layer its keys and values [K,Q,D] of what an encoder gave [Q,N], float64; none for layers that do not read it."""
    pairs: List[List[np.ndarray]] = []
    at = 0
    for kind in kinds:
        count = 2 if encoded is not None and kind.attention.reads_encoder else 0
        heads, size = kind.attention.kv_heads, kind.attention.head_size
        parts = [] if encoded is None else [encoded[:, at + index * heads * size :][:, : heads * size] for index in range(count)]
        pairs.append([part.astype(np.float64).reshape(-1, heads, size).swapaxes(0, 1) for part in parts])
        at += count * heads * size
    return pairs


def _masks(kinds: Sequence[LayerConfig], built: Sequence[PositionEncoding]) -> Tuple[torch.nn.ModuleList, List[int]]:
    """The masks of a model, and the one of each layer."""
    made: List[Mask] = []
    of_layer: List[int] = []
    index: Dict[Tuple[str, int], int] = {}
    for kind, encoding in zip(kinds, built, strict=True):
        key = (json.dumps(kind.attention.sees, sort_keys=True), id(encoding) if acts(encoding, "bias") else 0)
        if key not in index:
            index[key] = len(made)
            made.append(Mask(build("sees", kind.attention.sees), encoding))
        of_layer.append(index[key])
    return torch.nn.ModuleList(made), of_layer
