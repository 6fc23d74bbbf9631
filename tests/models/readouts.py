"""Encoders with a second output, tiny and with random weights."""

import functools

import torch
from torch import Tensor

from posenc_export.export import ReadAs, Sources
from posenc_export.export.read_module import ReadModule, as_model, read_out
from posenc_export.models.config import ReadoutConfig

IDS, WIDTH, POSITIONS = 61, 48, 64


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


def encoder(pooling: str = "", after: bool = False) -> ReadModule:
    """Return an encoder, with the second output sentence_embedding if there is a pooling. after:
    whether a layer to 7 numbers follows it.
    """
    model = as_model(Encoder().eval(), ReadAs(max_positions=POSITIONS, causal=False))
    assert isinstance(model, ReadModule)
    head = torch.nn.Sequential(torch.nn.Linear(WIDTH, 7), torch.nn.Tanh()).eval()
    if pooling:
        size = 7 if after else WIDTH
        config = ReadoutConfig(output="sentence_embedding", size=size, pooling=pooling)
        read_out(model, config, head if after else None)
    return model


@functools.cache
def sources(pooling: str = "", after: bool = False) -> Sources:
    """Return the sources of `encoder`; tests must not modify it."""
    return Sources(encoder(pooling, after))
