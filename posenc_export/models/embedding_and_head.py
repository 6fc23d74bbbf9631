"""The parts of a model before and after its layers: embeddings, output head, tokenizer."""

from dataclasses import dataclass, field
from typing import Any, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.models.config import HeadConfig, TokensConfig
from posenc_export.models.parts import build, float64


@dataclass(frozen=True)
class Text:
    """Tokenizer and special token ids of a model, which the artefact of a decoder gets."""

    tokenizer: bytes = b""  # bytes of tokenizer.json of the tokenizers library; empty for none
    stop_ids: Tuple[int, ...] = ()  # token ids that end a text
    start_ids: Tuple[int, ...] = ()  # first token ids of a decoder that reads an encoder
    # Further tokenizer files by name (models.checkpoint.TOKENIZER_FILES).
    files: Mapping[str, bytes] = field(default_factory=dict)
    # What generation_config.json says about generated tokens (models.generation_settings.read).
    generation: Mapping[str, Any] = field(default_factory=dict)


class Tokens(torch.nn.Module):
    """norm(embed(scale * table[ids]) + segments[types]) of width E; `embed` of an encoding."""

    def __init__(self, width: int, config: TokensConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        self.scale, self.encoding = float(config.scale), encoding
        self.embedding = torch.nn.Embedding(config.vocabulary, encoding.token_width(width))
        encoding.initialise_tokens(self.embedding.weight)
        self.segments = torch.nn.Embedding(config.segments, width) if config.segments else None
        if self.segments is not None:
            torch.nn.init.normal_(self.segments.weight, std=0.02)  # the standard deviation of BERT
        self.norm = build("norm", config.norm or {"name": "none"}, width)

    def forward(
        self, ids: Tensor, segments: Optional[Tensor], coordinates: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """ids, segments [B,S], coordinates [B,S] or [axes,B,S], states to [B,S,E], new states."""
        x = ops.scale(self.embedding(ids), self.scale)
        x, present = self.encoding.embed_next(x, coordinates, states)
        if self.segments is not None and segments is not None:
            x = x + self.segments(segments)
        return self.norm(x), present

    def exact(
        self, ids: np.ndarray, segments: Optional[np.ndarray], places: Sequence[Any]
    ) -> np.ndarray:
        """Compute one row of ids [n] at positions or coordinates to [n,E], float64."""
        rows = self.embedding.weight[torch.from_numpy(ids)].detach().double().numpy() * self.scale
        x = self.encoding.oracle().embed_rows(rows, places)
        if self.segments is not None:
            types = np.zeros(len(x), np.int64) if segments is None else segments
            x = x + float64.numbers(self.segments.weight)[types]
        return np.asarray(self.norm.exact(x))


class Head(torch.nn.Module):
    """softcap tanh(scale (W x + b) / softcap), or scale (W x + b) without a softcap: logits.
    W [V,E] is a table or created.
    """

    def __init__(self, width: int, size: int, config: HeadConfig, table: Optional[Tensor]) -> None:
        super().__init__()
        self.scale, self.softcap = float(config.scale), config.softcap or 0.0
        self.linear = torch.nn.Linear(width, size, bias=config.bias)
        if table is not None:
            self.linear.weight = table

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to logits [B,S,V]."""
        logits = ops.scale(self.linear(x), self.scale)
        if self.softcap > 0:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Compute x [n,E] to [n,V], float64."""
        logits = float64.linear(self.linear, x) * self.scale
        return self.softcap * np.tanh(logits / self.softcap) if self.softcap else logits
