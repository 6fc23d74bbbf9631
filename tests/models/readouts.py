"""Encoders with a second output, tiny and with random weights."""

import functools
from typing import Any, Dict, Optional

import torch
from torch import Tensor

from posenc_export.export import ReadAs, Sources
from posenc_export.export.read_module import ReadModule, as_model, read_out
from posenc_export.models.config import ReadoutConfig

IDS, WIDTH, POSITIONS = 61, 48, 64
AFTER: Dict[str, Any] = {
    "tanh": lambda width: torch.nn.Sequential(torch.nn.Linear(width, 7), torch.nn.Tanh()),
    "labels": lambda width: torch.nn.Sequential(
        torch.nn.LayerNorm(width), torch.nn.Linear(width, 3)
    ),
}


class Encoder(torch.nn.Module):
    """Two layers of torch over token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(IDS, WIDTH)
        self.places = torch.nn.Embedding(POSITIONS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 40, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B,S] to [B,S,E]."""
        return self.layers(self.tokens(ids) + self.places(torch.arange(ids.size(1))))


def encoder(*pooling: str, after: Optional[str] = None) -> ReadModule:
    """Return an encoder, with a second output if there is a pooling or something after it: for each
    token `logits`, else `sentence_embedding`.
    """
    model = as_model(Encoder().eval(), ReadAs(max_positions=POSITIONS, causal=False))
    assert isinstance(model, ReadModule)
    width = WIDTH * max(len(pooling), 1)
    head = None if after is None else AFTER[after](width).eval()
    if pooling or head is not None:
        size = width if after is None else head[-2 if after == "tanh" else -1].out_features
        output = "sentence_embedding" if pooling else "logits"
        read_out(model, ReadoutConfig(output=output, size=size, pooling=pooling), head)
    return model


@functools.lru_cache(maxsize=None)
def sources(*pooling: str, after: Optional[str] = None) -> Sources:
    """Return the sources of `encoder`; tests must not modify it."""
    return Sources(encoder(*pooling, after=after))
