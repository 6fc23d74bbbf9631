"""Tokens, layers and a head, as a description has them: decoders and encoders of every family."""

import dataclasses
import json
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.encodings.base import Geometry, PositionEncoding
from posenc_export.encodings.together import acts, axes_of
from posenc_export.models.attention import attention, check_works
from posenc_export.models.config import HeadConfig, LayerConfig, StackConfig, TokensConfig
from posenc_export.models.parts import PARTS, build, exact


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


@dataclasses.dataclass(frozen=True)
class Text:
    """What turns text into token ids and says where a text ends: it travels with the artefact of a decoder.

    Args:
        tokenizer: tokenizer.json of the tokenizers library; empty for none.
        stop_ids: token ids that end a text.
        files: what else stands beside a tokenizer, by name (models.checkpoint.BESIDE).
    """

    tokenizer: bytes = b""
    stop_ids: Tuple[int, ...] = ()
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


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


class Tokens(torch.nn.Module):
    """norm(embed(scale * table[ids]) + segments[types]).

    Args:
        width: model width E.
        config: table, factor, segments, norm.
        encoding: acts on embedded tokens.
    """

    def __init__(self, width: int, config: TokensConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        self.scale, self.encoding = config.scale, encoding
        self.embedding = torch.nn.Embedding(config.vocabulary, encoding.token_width(width))
        encoding.initialise_tokens(self.embedding.weight)
        self.segments = torch.nn.Embedding(config.segments, width) if config.segments else None
        if self.segments is not None:
            torch.nn.init.normal_(self.segments.weight, std=0.02)  # the standard deviation of BERT
        self.norm = build("norm", config.norm or {"name": "none"}, width)

    def forward(self, ids: Tensor, segments: Optional[Tensor], coordinates: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """ids, segments [B,S] int64, coordinates [B,S] or [A,B,S], states of the encoding to [B,S,E] and the states' next values."""
        x = self.embedding(ids)
        if self.scale != 1.0:
            x = x * self.scale
        x, present = self.encoding.embed_next(x, coordinates, states)
        if self.segments is not None and segments is not None:
            x = x + self.segments(segments)
        return self.norm(x), present

    def exact(self, ids: np.ndarray, segments: Optional[np.ndarray], positions: range) -> np.ndarray:
        """One row of ids [n] to [n,E], float64."""
        rows = self.embedding.weight[torch.from_numpy(ids)].detach().double().numpy() * self.scale
        x = self.encoding.oracle().embed_rows(rows, positions)
        if self.segments is not None:
            x = x + exact.numbers(self.segments.weight)[np.zeros(len(x), np.int64) if segments is None else segments]
        return np.asarray(self.norm.exact(x))


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

    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any]) -> np.ndarray:
        """One row x [n,E] to [n,E], float64."""
        attention: Any = self.attention
        return np.asarray(self.residual.exact(x, lambda read: attention.exact(read, positions, places), self.mlp.exact))


class Head(torch.nn.Module):
    """softcap tanh(scale (W x + b) / softcap), without the cap where there is none.

    Args:
        width: model width E.
        vocabulary: number of token ids V.
        config: factor, cap, bias.
        table: weights W to share; own ones where None.
    """

    def __init__(self, width: int, vocabulary: int, config: HeadConfig, table: Optional[Tensor]) -> None:
        super().__init__()
        self.scale, self.softcap = config.scale, config.softcap or 0.0
        self.linear = torch.nn.Linear(width, vocabulary, bias=config.bias)
        if table is not None:
            self.linear.weight = table  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to logits [B,S,V]."""
        logits = self.linear(x)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap > 0:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,E] to [n,V], float64."""
        logits = exact.linear(self.linear, x) * self.scale
        return self.softcap * np.tanh(logits / self.softcap) if self.softcap else logits


class Stack(torch.nn.Module):
    """Token ids to logits, or to hidden states where there is no head.

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
        geometries = [kind.attention.geometry(width, config.max_positions) for kind in kinds]
        self.token_encoding = shelf.take(config.tokens.encodings, geometries[0])
        built = [shelf.take(kind.attention.encodings, geometry) for kind, geometry in zip(kinds, geometries, strict=True)]
        check_places([self.token_encoding], built)
        check_works(self.token_encoding, geometries[0].causal)
        self.axes, self.segments = axes_of([self.token_encoding, *built]), config.tokens.segments
        self.tokens = Tokens(width, config.tokens, self.token_encoding)
        self.layers = torch.nn.ModuleList(Layer(width, kind, encoding) for kind, encoding in zip(kinds, built, strict=True))
        self.norm = build("norm", config.norm or {"name": "none"}, width)
        self.head = self._made_head()
        self.masks, self.mask_of = _masks(kinds, built)
        self.embed_states = len(self.token_encoding.embed_states())
        self.layer_states = [len(layer.attention.states()) for layer in self.layers]  # type: ignore[union-attr,operator]
        if self.segments and any(self.layer_states):
            raise ValueError("config: segments belong to models without a cache, got them beside causal layers; leave them out")

    def _made_head(self) -> torch.nn.Module:
        config, table = self.config.head, self.tokens.embedding.weight
        if config is None:
            return torch.nn.Identity()
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
    ) -> Tuple[Tensor, List[Tensor]]:
        """x and segments [B,S] int64, the rest as AttentionBlock.forward, states layer by layer, to logits [B,S,V] or hidden states [B,S,E], and new states."""
        x, present = self.tokens(x, segments, coordinates, states[: self.embed_states])
        masks: List[Tensor] = []
        for mask in self.masks:
            masks.append(mask(positions, key_positions, x))
        first = self.embed_states
        for index, layer in enumerate(self.layers):
            behind = first + self.layer_states[index]
            x, carried = layer(x, positions, coordinates, key_positions, masks[self.mask_of[index]], write_index, states[first:behind])
            present, first = present + carried, behind
        return self.head(self.norm(x)), present

    @torch.jit.unused
    def attentions(self) -> List[Any]:
        """The attention of each layer."""
        return [layer.attention for layer in self.layers]

    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any], segments: Optional[np.ndarray] = None) -> np.ndarray:
        """One row of ids [n] at positions and coordinates to [n,V] or [n,E], float64."""
        rows = self.tokens.exact(x, segments, positions)
        for layer in self.layers:
            rows = layer.exact(rows, positions, places)  # type: ignore[operator]
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
