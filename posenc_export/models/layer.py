"""One layer of a model, and the masks that layers share."""

import json
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.encodings.shared.combined import overrides
from posenc_export.models.attention import attention
from posenc_export.models.config import LayerConfig
from posenc_export.models.parts import build
from posenc_export.models.parts.visibility import Visibility
from posenc_export.ops import TokenPlaces
from posenc_export.shared.refusal import refusal


class Mask(torch.nn.Module):
    """Attention mask with the bias of an encoding; layers with equal masks share one."""

    def __init__(self, visibility: Visibility, encoding: PositionEncoding) -> None:
        super().__init__()
        self.before, self.after, self.chunk = visibility.before, visibility.after, visibility.chunk
        self.encoding, self.grid_bias = encoding, encoding.grid_bias

    def forward(self, places: TokenPlaces, like: Tensor) -> Tensor:
        """Return the mask [B,1 or H,S,T] in like's dtype."""
        positions, key_positions = places.positions, places.key_positions
        if self.grid_bias:
            bias = self.encoding.bias(places.coordinates, places.coordinates)
        else:
            bias = self.encoding.bias(positions, key_positions)
        limits = (self.before, self.after, self.chunk)
        return ops.attention_mask(positions, key_positions, bias, like, *limits)


class Layer(torch.nn.Module):
    """One layer of width E: attention with an encoding, and MLP, with norms and residual sums."""

    def __init__(self, width: int, kind: LayerConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        if len(kind.norms) != 2:
            raise refusal("config", "2 norms of a layer", len(kind.norms), "correct norms")
        norms = [build("norm", norm, width) for norm in kind.norms]
        self.residual = build("residual", kind.residual, *norms)
        self.attention = attention(width, kind.attention, encoding)
        self.mlp = build("mlp", kind.mlp, width)

    def forward(
        self, x: Tensor, places: TokenPlaces, mask: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Shapes as Attention.forward."""
        normed = self.residual.attention_input(x)
        y, present = self.attention(normed, places, mask, states)
        between = self.residual.after_attention(x, y)
        y = self.mlp(self.residual.mlp_input(between))
        return self.residual.after_mlp(between, y), present

    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any]) -> np.ndarray:
        """One row x [n,E] to [n,E], float64."""
        attention: Any = self.attention

        def attend(normed: np.ndarray) -> np.ndarray:
            return np.asarray(attention.exact(normed, positions, places))

        return np.asarray(self.residual.exact(x, attend, self.mlp.exact))


def shared_masks(
    kinds: Sequence[LayerConfig], built: Sequence[PositionEncoding]
) -> tuple[torch.nn.ModuleList, list[int]]:
    """Return the distinct masks of a model, and the index of the mask of each layer."""
    masks: dict[tuple[str, int], Mask] = {}
    of_layers: list[tuple[str, int]] = []
    for kind, encoding in zip(kinds, built, strict=True):
        biased = id(encoding) if overrides(encoding, "bias") else 0
        of_layers.append((json.dumps(kind.attention.sees, sort_keys=True), biased))
        masks.setdefault(of_layers[-1], Mask(build("sees", kind.attention.sees), encoding))
    return torch.nn.ModuleList(masks.values()), [*map(list(masks).index, of_layers)]
