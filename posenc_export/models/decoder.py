"""A small pre-norm decoder: token embedding, blocks of attention and MLP, norm, head."""

from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.encodings.base import PositionEncoding
from posenc_export.models.attention import Attention
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


class Layer(torch.nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: DecoderConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        width = config.attention.width
        self.attention_norm, self.mlp_norm = (NORMS[config.norm](width, eps=config.epsilon) for _ in range(2))
        self.attention = Attention(config.attention, encoding)
        self.mlp = MLPS[config.mlp](width, config.hidden, config.mlp_bias)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, write_index: Tensor, past_key: Tensor, past_value: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Shapes as Attention.forward."""
        y, keys, values = self.attention(self.attention_norm(x), positions, mask, write_index, past_key, past_value)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), keys, values


class Decoder(torch.nn.Module):
    """Token ids to logits; one encoding shared by all layers.

    Args:
        config: the decoder's description.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.source: Dict[str, Any] = {}  # how to build the same weights again, if there is a way (models.presets)
        self.config = config
        self.encoding = encodings.build(config.attention.encoding, config.attention.geometry)
        self.embedding = torch.nn.Embedding(config.vocabulary, config.attention.width)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)  # the standard deviation of GPT-2
        self.layers = torch.nn.ModuleList(Layer(config, self.encoding) for _ in range(config.layers))
        self.norm = NORMS[config.norm](config.attention.width, eps=config.epsilon)
        self.head = torch.nn.Linear(config.attention.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.causal = config.attention.causal

    def forward(self, x: Tensor, positions: Tensor, key_positions: Tensor, write_index: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] int64 token ids, positions [B,S], key_positions [B,T], write_index [B], states [key, value] per layer to logits [B,S,V], new states."""
        x = self.encoding.embed(self.embedding(x), positions)
        mask = ops.attention_mask(positions, key_positions, self.encoding.bias(positions, key_positions), self.causal, x)
        present: List[Tensor] = []
        for index, layer in enumerate(self.layers):
            x, keys, values = layer(x, positions, mask, write_index, states[2 * index], states[2 * index + 1])
            present += [keys, values]
        return self.head(self.norm(x)), present
