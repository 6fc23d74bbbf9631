"""Decoders and encoders of all families: tokens, layers and a head, built from a description."""

import json
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.encodings.shared.combined import axes_of, overrides
from posenc_export.models.attention import attention, check_direction
from posenc_export.models.config import HeadConfig, LayerConfig, StackConfig
from posenc_export.models.embedding_and_head import Features, Head, Text, Tokens
from posenc_export.models.parts import PARTS, build
from posenc_export.models.parts.readout import Readout, pooling
from posenc_export.models.parts.visibility import Visibility
from posenc_export.models.whole_pass import check_dtype, whole_pass


class Mask(torch.nn.Module):
    """Attention mask with the bias of an encoding. Layers with equal masks share one.

    Args:
        visibility: which keys a query attends to.
        encoding: encoding whose `bias` is added.
    """

    def __init__(self, visibility: Visibility, encoding: PositionEncoding) -> None:
        super().__init__()
        self.before, self.after, self.chunk = visibility.before, visibility.after, visibility.chunk
        self.encoding = encoding

    def forward(self, positions: Tensor, key_positions: Tensor, like: Tensor) -> Tensor:
        """positions [B,S], key_positions [B,T] int64 to [B,1 or H,S,T] in like's dtype."""
        return ops.attention_mask(
            positions,
            key_positions,
            self.encoding.bias(positions, key_positions),
            like,
            self.before,
            self.after,
            self.chunk,
        )


class Layer(torch.nn.Module):
    """One layer: attention and MLP with norms and residual sums.

    Args:
        width: model width E.
        kind: description of the layer.
        encoding: encoding of its attention.

    Raises:
        ValueError: not as many norms as the residual needs.
    """

    def __init__(self, width: int, kind: LayerConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        norms = [build("norm", norm, width) for norm in kind.norms]
        needed = len(getattr(PARTS["residual"].get(kind.residual.get("name", "")), "NORMS", norms))
        if len(norms) != needed:
            raise ValueError(
                f"config: expected {needed} norms for residual {kind.residual['name']}, got "
                f"{len(norms)}; change norms or residual"
            )
        self.residual = build("residual", kind.residual, norms)
        self.attention = attention(width, kind.attention, encoding)
        self.mlp = build("mlp", kind.mlp, width)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        coordinates: Tensor,
        key_positions: Tensor,
        mask: Tensor,
        write_index: Tensor,
        states: List[Tensor],
    ) -> Tuple[Tensor, List[Tensor]]:
        """Shapes as Attention.forward."""
        y, present = self.attention(
            self.residual.attention_input(x),
            positions,
            coordinates,
            key_positions,
            mask,
            write_index,
            states,
        )
        between = self.residual.after_attention(x, y)
        return self.residual.after_mlp(
            between, self.mlp(self.residual.mlp_input(x, between))
        ), present

    def exact(
        self,
        x: np.ndarray,
        positions: range,
        places: Sequence[Any],
        types: Optional[np.ndarray] = None,
        encoded: Sequence[np.ndarray] = (),
    ) -> np.ndarray:
        """Compute one row x [n,E] with optional token types [n] and, for cross-attention, keys
        and values [K,Q,D] of an encoder to [n,E], float64.
        """
        attention: Any = self.attention
        further = encoded or (types,)
        return np.asarray(
            self.residual.exact(
                x,
                lambda normed: attention.exact(normed, positions, places, *further),
                self.mlp.exact,
            )
        )


class Stack(torch.nn.Module):
    """A model that maps token ids to logits; without a head to hidden states or to keys and values
    for a decoder; without layers to embedded tokens.

    Args:
        config: description of the model.

    Raises:
        ValueError: a tied head with a token table of another width, encodings at a place where they
            have no effect, segments in a model with a cache.
    """

    __jit_ignored_attributes__ = ["text", "stored"]

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        # How to rebuild the same weights, empty if that is not possible (models.presets).
        self.source: Dict[str, Any] = {}
        self.text = Text()
        self.stored: Mapping[str, Any] = {}
        self.config = config
        width, kinds = config.width, config.kinds
        self.token_encoding, *built = _encodings(config)
        check_places([self.token_encoding], built)
        check_direction(self.token_encoding, config.token_geometry.causal)
        self.axes, self.segments = axes_of([self.token_encoding, *built]), config.tokens.segments
        self.tokens: Any = (Tokens if config.tokens.features is None else Features)(
            width, config.tokens, self.token_encoding
        )
        self.layers = torch.nn.ModuleList(
            Layer(width, kind, encoding) for kind, encoding in zip(kinds, built, strict=True)
        )
        self.norm = build("norm", config.norm or {"name": "none"}, width)
        self.head = self._build_head()
        self.readout = readout(config, getattr(self.tokens, "embedding", None))
        self.masks, self.mask_of = _masks(kinds, built)
        self.reads_encoder = [kind.attention.reads_encoder for kind in kinds]
        self.mask_of_encoder = [
            self.reads_encoder[self.mask_of.index(index)] for index in range(len(self.masks))
        ]
        self.embed_states = len(self.token_encoding.embed_states())
        self.layer_states = [len(layer.attention.states()) for layer in self.layers]  # type: ignore[union-attr,operator]
        self.kept_states = self.embed_states + sum(self.layer_states)
        if self.segments and any(self.layer_states):
            raise ValueError(
                "config: expected segments only in models without a cache, got causal "
                "layers; leave segments out"
            )

    def _build_head(self) -> torch.nn.Module:
        config, key_values = self.config.head, self.config.key_values
        if key_values is not None:
            return Head(self.config.width, key_values.size, HeadConfig(bias=key_values.bias), None)
        if config is None:
            return torch.nn.Identity()
        table = self.tokens.embedding.weight
        if config.tied and table.size(1) != self.config.width:
            rule = (
                f"decoder: expected a token table of the model's width {self.config.width} for a "
                "tied head"
            )
            raise ValueError(f"{rule}, got {table.size(1)}; set tied=False")
        return Head(self.config.width, table.size(0), config, table if config.tied else None)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call `forward`; with x and, for a model with token types, segments alone compute whole
        sequences at positions 0 .. S-1 (whole_pass), as for training.

        Raises:
            ValueError: the weights are float64 (whole_pass.check_dtype); as whole_pass.
        """
        check_dtype(self)
        if len(arguments) == 1 and named.keys() <= {"segments"}:
            return whole_pass(self, *arguments, **named)
        return super().__call__(*arguments, **named)

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
        """x and segments [B,S] int64, other inputs as for AttentionBlock.forward, to logits
        [B,S,V], hidden states [B,S,E] or keys and values [B,S,N], new states. An encoder with a
        readout, which has no states, returns [readout] in their place.

        Args:
            states: states of the token encoding, then of each layer. For a decoder that reads an
                encoder, these follow: the attention mask [B,Q] int64 of the encoder, and a key and
                a value [B,K,Q,D] for each cross-attention layer. They are not among the new states.
            logits_index: columns [B,R] int64 of the tokens whose logits [B,R,V] are returned; None
                for all tokens.
        """
        x, present = self.tokens(x, segments, coordinates, states[: self.embed_states])
        of_encoder = states[self.kept_states :]
        masks: List[Tensor] = []
        for index, mask in enumerate(self.masks):
            masks.append(
                mask(
                    positions,
                    of_encoder[0] - 1 if self.mask_of_encoder[index] else key_positions,
                    x,
                )
            )
        first, pair = self.embed_states, 1
        # Some encodings of scores use token types; models with segments have no states.
        types = states[:0] if segments is None else [segments]
        for index, layer in enumerate(self.layers):
            end = first + self.layer_states[index]
            layer_states = states[first:end] + types
            if self.reads_encoder[index]:
                layer_states, pair = of_encoder[pair : pair + 2], pair + 2
            x, new_states = layer(
                x,
                positions,
                coordinates,
                key_positions,
                masks[self.mask_of[index]],
                write_index,
                layer_states,
            )
            present, first = present + new_states, end
        if logits_index is not None:
            x = ops.select_tokens(x, logits_index)
        x = self.norm(x)
        if self.readout is not None:
            present = present + [self.readout(x, positions)]
        return self.head(x), present

    @torch.jit.unused
    def attentions(self) -> List[Any]:
        """Return the attention of each layer."""
        return [layer.attention for layer in self.layers]

    def exact(
        self,
        x: np.ndarray,
        positions: range,
        places: Sequence[Any],
        segments: Optional[np.ndarray] = None,
        encoded: Optional[np.ndarray] = None,
    ) -> np.ndarray:
        """Compute one row of ids [n] at positions and coordinates, with optional outputs [Q,N]
        of an encoder, to [n,V], [n,E] or [n,N], float64.
        """
        rows = self.tokens.exact(x, segments, places)
        for layer, pair in zip(
            self.layers, _keys_and_values(self.config.kinds, encoded), strict=True
        ):
            rows = layer.exact(rows, positions, places, segments, pair)  # type: ignore[operator]
        rows = self.norm.exact(rows)
        if isinstance(self.head, torch.nn.Identity):
            return rows
        return np.asarray(self.head.exact(rows))  # type: ignore[operator]


def readout(config: StackConfig, tokens: Optional[torch.nn.Embedding]) -> Optional[Readout]:
    """Build the readout of a model, or return None if it has none.

    Args:
        tokens: the token table, the weight of a tied layer; None for a model that reads features.

    Raises:
        ValueError: an unknown pooling or layer, a parameter that it refuses, or a tied layer of
            another shape than the token table.
    """
    if config.readout is None:
        return None
    size, layers = config.width * max(len(config.readout.pooling), 1), []
    for spec in config.readout.layers:
        layers.append(build("readout", spec, size))
        size = spec.get("size", size)
        if spec.get("tied"):
            linear = layers[-1].linear
            if tokens is None or tokens.weight.shape != linear.weight.shape:
                found = "no table" if tokens is None else f"a table {list(tokens.weight.shape)}"
                raise ValueError(
                    f"config: expected a token table {list(linear.weight.shape)} for a tied "
                    f"layer of readout, got {found}; set tied to false"
                )
            linear.weight = tokens.weight
    return Readout([pooling(name) for name in config.readout.pooling], layers)


def check_places(
    on_tokens: Sequence[PositionEncoding], in_layers: Sequence[PositionEncoding]
) -> None:
    """Check that encodings on tokens have hooks for tokens, and encodings in layers have hooks for
    layers.

    Raises:
        ValueError: an encoding has a hook that is not called at its place.
    """
    for found, hooks, here, there in (
        (on_tokens, ("rotate", "bias", "observe", "rescore"), "on tokens", "in layers"),
        (in_layers, ("embed", "embed_next"), "in layers", "on tokens"),
    ):
        for one in found:
            if overrides(one, *hooks):
                raise ValueError(
                    "config: expected encodings at the place where they act, got "
                    f"{type(one).__name__} {here}; put it {there}"
                )


def _encodings(config: StackConfig) -> List[PositionEncoding]:
    """Build the encoding of tokens and that of each layer. Equal specifications share one object
    and its tables, if the encoding can be shared.
    """
    shared: Dict[Tuple[str, Geometry], PositionEncoding] = {}
    built: List[PositionEncoding] = []
    attentions = [kind.attention for kind in config.kinds]
    in_layers = [
        (attention.encodings, attention.geometry(config.width, config.max_positions))
        for attention in attentions
    ]
    for specs, geometry in ((config.tokens.encodings, config.token_geometry), *in_layers):
        key = (json.dumps(specs, sort_keys=True), geometry)
        built.append(shared.get(key) or encodings.build_all(specs, geometry))
        if built[-1].shared:
            shared[key] = built[-1]
    return built


def _keys_and_values(
    kinds: Sequence[LayerConfig], encoded: Optional[np.ndarray]
) -> List[List[np.ndarray]]:
    """Split the outputs [Q,N] of an encoder into key and value [K,Q,D] for each cross-attention
    layer, float64. Other layers get an empty list.
    """
    pairs: List[List[np.ndarray]] = []
    at = 0
    for kind in kinds:
        count = 2 if encoded is not None and kind.attention.reads_encoder else 0
        heads, size = kind.attention.kv_heads, kind.attention.head_size
        parts = (
            []
            if encoded is None
            else [
                encoded[:, at + index * heads * size :][:, : heads * size] for index in range(count)
            ]
        )
        pairs.append(
            [part.astype(np.float64).reshape(-1, heads, size).swapaxes(0, 1) for part in parts]
        )
        at += count * heads * size
    return pairs


def _masks(
    kinds: Sequence[LayerConfig], built: Sequence[PositionEncoding]
) -> Tuple[torch.nn.ModuleList, List[int]]:
    """Return the distinct masks of a model, and the index of the mask of each layer."""
    masks: List[Mask] = []
    mask_of_layer: List[int] = []
    index: Dict[Tuple[str, int], int] = {}
    for kind, encoding in zip(kinds, built, strict=True):
        key = (
            json.dumps(kind.attention.sees, sort_keys=True),
            id(encoding) if overrides(encoding, "bias") else 0,
        )
        if key not in index:
            index[key] = len(masks)
            masks.append(Mask(build("sees", kind.attention.sees), encoding))
        mask_of_layer.append(index[key])
    return torch.nn.ModuleList(masks), mask_of_layer
