"""A small post-norm encoder with segments: BERT's shape (Devlin et al. 2018), around any encoding that runs without a cache."""

from typing import Any, Dict, List

import torch
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.encodings.base import PositionEncoding
from posenc_export.models.attention import attention, one_or_each
from posenc_export.models.config import EncoderConfig
from posenc_export.models.decoder import GELU


class PostNormLayer(torch.nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)) (Vaswani et al. 2017, 3.1)."""

    def __init__(self, config: EncoderConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        width = config.attention.width
        self.attention = attention(config.attention, encoding)
        self.attention_norm, self.mlp_norm = (torch.nn.LayerNorm(width, eps=config.epsilon) for _ in range(2))
        self.mlp = GELU(width, config.hidden, True)

    def forward(self, x: Tensor, positions: Tensor, coordinates: Tensor, mask: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S], coordinates as Attention.forward, mask [B,1 or H,S,S] to [B,S,E]."""
        states: List[Tensor] = []
        y, _ = self.attention(x, positions, coordinates, positions, mask, torch.zeros_like(positions[:, 0]), states)
        x = self.attention_norm(x + y)
        return self.mlp_norm(x + self.mlp(x))


class Encoder(torch.nn.Module):
    """Token ids and segments to hidden states: norm(embed(tokens, positions) + segments), then post-norm layers. No cache, no states.

    Args:
        config: the encoder's description.

    Raises:
        ValueError: an encoding that looks back only, or has a token table of another width than the model.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.source: Dict[str, Any] = {}  # how to build the same weights again, if there is a way (models.presets)
        self.config = config
        block = config.attention
        self.encoding = encodings.build(block.encoding, block.geometry)
        if self.encoding.token_width(block.width) != block.width:
            raise ValueError(f"encoder: the token table is as wide as the model, got {block.encoding['name']}, which wants another; use it in a decoder")
        built = one_or_each(block, self.encoding, config.layers)
        self.embedding, self.segments = torch.nn.Embedding(config.vocabulary, block.width), torch.nn.Embedding(config.segments, block.width)
        self.encoding.initialise_tokens(self.embedding.weight)
        torch.nn.init.normal_(self.segments.weight, std=0.02)  # the standard deviation of BERT
        self.norm = torch.nn.LayerNorm(block.width, eps=config.epsilon)
        self.layers = torch.nn.ModuleList(PostNormLayer(config, encoding) for encoding in built)

    def forward(self, x: Tensor, token_type_ids: Tensor, positions: Tensor, coordinates: Tensor) -> Tensor:
        """x, token_type_ids, positions [B,S] int64 (-1 padding), coordinates [B,S] or [A,B,S] to hidden states [B,S,E]."""
        x = self.norm(self.encoding.embed(self.embedding(x), coordinates) + self.segments(token_type_ids))
        mask = ops.attention_mask(positions, positions, self.encoding.bias(positions, positions), False, x)
        for layer in self.layers:
            x = layer(x, positions, coordinates, mask)
        return x
