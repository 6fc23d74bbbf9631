"""The parts of a model before and after its layers: embeddings, output head, tokenizer."""

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.models.config import TokensConfig
from posenc_export.models.parts import build, float64


@dataclass(frozen=True)
class Text:
    """Tokenizer and special token ids of a model, which the artefact of a decoder gets."""

    tokenizer: bytes = b""  # bytes of tokenizer.json of the tokenizers library; empty for none
    stop_ids: tuple[int, ...] = ()  # token ids that end a text
    start_ids: tuple[int, ...] = ()  # first token ids of a decoder that reads an encoder
    # Further tokenizer files by name (models.checkpoint.TOKENIZER_FILES).
    files: Mapping[str, bytes] = field(default_factory=dict)
    # What generation_config.json says about generated tokens (models.text_settings).
    generation: Mapping[str, Any] = field(default_factory=dict)


class Tokens(torch.nn.Module):
    """norm(embed(table[ids])) of width E; `embed` of an encoding."""

    def __init__(self, width: int, config: TokensConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        self.encoding = encoding
        self.embedding = torch.nn.Embedding(config.vocabulary, encoding.token_width(width))
        encoding.initialise_tokens(self.embedding.weight)
        self.norm = build("norm", config.norm or {"name": "none"}, width)

    def forward(
        self, ids: Tensor, coordinates: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """ids [B,S], coordinates [B,S] or [axes,B,S], states to [B,S,E], new states."""
        x, present = self.encoding.embed_next(self.embedding(ids), coordinates, states)
        return self.norm(x), present

    def exact(self, ids: np.ndarray, places: Sequence[Any]) -> np.ndarray:
        """Compute one row of ids [n] at positions or coordinates to [n,E], float64."""
        rows = self.embedding.weight[torch.from_numpy(ids)].detach().double().numpy()
        return np.asarray(self.norm.exact(self.encoding.oracle().embed_rows(rows, places)))


class Head(torch.nn.Module):
    """W x: logits. W [V,E] is a table or created."""

    def __init__(self, width: int, size: int, table: Tensor | None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, size, bias=False)
        if table is not None:
            self.linear.weight = table

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to logits [B,S,V]."""
        return self.linear(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Compute x [n,E] to [n,V], float64."""
        return float64.linear(self.linear, x)
