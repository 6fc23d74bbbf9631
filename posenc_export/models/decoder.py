"""A small pre-norm decoder: token embedding, blocks of attention and MLP, norm, head."""

from itertools import cycle
from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.encodings.base import PositionEncoding
from posenc_export.models.attention import attention, one_or_each
from posenc_export.models.config import DecoderConfig


class SwiGLU(torch.nn.Module):
    """down(silu(gate x) * up x) (Shazeer 2020, GLU Variants Improve Transformer)."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = torch.nn.Linear(width, hidden, bias=bias), torch.nn.Linear(width, hidden, bias=bias)
        self.down = torch.nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to [B,S,E]."""
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class GELU(torch.nn.Module):
    """down(gelu(up x)) (Hendrycks and Gimpel 2016)."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, hidden, bias=bias), torch.nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to [B,S,E]."""
        return self.down(torch.nn.functional.gelu(self.up(x)))


NORMS = {"rms": torch.nn.RMSNorm, "layer": torch.nn.LayerNorm}
MLPS = {"swiglu": SwiGLU, "gelu": GELU}


def of_layers(config: DecoderConfig, encoding: PositionEncoding) -> List[PositionEncoding]:
    """The encoding of each layer, `encoding` being that of the model.

    Raises:
        ValueError: layer encodings that act on tokens or bias, or read other coordinates than the model's.
    """
    if not config.layer_encodings:
        return one_or_each(config.attention, encoding, config.layers)
    in_turn = config.layer_encodings
    made: List[PositionEncoding] = []
    for layer in range(config.layers):
        spec = in_turn[layer % len(in_turn)]
        same = (one for one, before in zip(made, cycle(in_turn), strict=False) if before == spec and one.shared)  # one table for all layers that turn alike
        made.append(next(same, None) or encodings.build(spec, config.attention.geometry))
    for hooks, found in ((("embed", "embed_next", "bias"), made), (("rotate", "bias", "observe", "rescore"), [encoding])):
        for one in found:
            if one.axes != encoding.axes or any(getattr(type(one), hook) is not getattr(PositionEncoding, hook) for hook in hooks):
                place = "a layer" if one is not encoding else "token embeddings"
                raise ValueError(f"decoder: beside layer_encodings {type(one).__name__} acts on {place} only, got one that acts elsewhere; leave layer_encodings out")
    return made


class Layer(torch.nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: DecoderConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        width = config.attention.width
        self.attention_norm, self.mlp_norm = (NORMS[config.norm](width, eps=config.epsilon) for _ in range(2))
        self.attention = attention(config.attention, encoding)
        self.mlp = MLPS[config.mlp](width, config.hidden, config.mlp_bias)

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor, mask: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """Shapes as Attention.forward."""
        y, present = self.attention(self.attention_norm(x), positions, coordinates, key_positions, mask, write_index, states)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), present


class Decoder(torch.nn.Module):
    """Token ids to logits; one encoding for all layers, or one for each (PositionEncoding.shared, DecoderConfig.layer_encodings).

    Args:
        config: the decoder's description.

    Raises:
        ValueError: a tied head where the encoding's token table is of another width, layer encodings that act elsewhere than in a layer.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.source: Dict[str, Any] = {}  # how to build the same weights again, if there is a way (models.presets)
        self.config = config
        block = config.attention
        self.encoding = encodings.build(block.encoding, block.geometry)
        built = of_layers(config, self.encoding)
        token_width = self.encoding.token_width(block.width)
        if config.tied and token_width != block.width:
            raise ValueError(f"decoder: a tied head needs a token table as wide as the model, got {token_width} and {block.width}; set tied=False")
        self.embedding = torch.nn.Embedding(config.vocabulary, token_width)
        self.encoding.initialise_tokens(self.embedding.weight)
        self.layers = torch.nn.ModuleList(Layer(config, encoding) for encoding in built)
        self.norm = NORMS[config.norm](block.width, eps=config.epsilon)
        self.head = torch.nn.Linear(block.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.causal = block.causal
        self.embed_states = len(self.encoding.embed_states())
        self.layer_states = [len(layer.attention.states()) for layer in self.layers]  # type: ignore[union-attr,operator]

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] int64 token ids, the rest as AttentionBlock.forward, states layer by layer, to logits [B,S,V] and new states."""
        x, present = self.encoding.embed_next(self.embedding(x), coordinates, states[: self.embed_states])
        mask = ops.attention_mask(positions, key_positions, self.encoding.bias(positions, key_positions), self.causal, x)
        first = self.embed_states
        for index, layer in enumerate(self.layers):
            behind = first + self.layer_states[index]
            x, carried = layer(x, positions, coordinates, key_positions, mask, write_index, states[first:behind])
            present, first = present + carried, behind
        return self.head(self.norm(x)), present
