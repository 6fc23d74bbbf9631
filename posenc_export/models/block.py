"""An attention block: one attention layer with its encodings, to export or to use in a module."""

from typing import Any, Sequence

import numpy as np
from torch import Tensor

from posenc_export import encodings
from posenc_export.encodings.shared.combined import parts_of
from posenc_export.models.attention import attention
from posenc_export.models.config import BlockConfig
from posenc_export.models.layer import Mask
from posenc_export.models.parts import build
from posenc_export.models.whole_pass import Whole
from posenc_export.ops import TokenPlaces
from posenc_export.shared.refusal import refusal


class AttentionBlock(Whole):
    """One attention with its encodings: hidden states in, hidden states out.

    Args:
        config: description of the block.

    Raises:
        ValueError: an encoding that needs token ids, encodings at a place where they have no
            effect.
    """

    def __init__(self, config: BlockConfig) -> None:
        geometry = config.attention.geometry(config.width, config.max_positions)
        on_tokens, encoding = (
            encodings.build_all(specs, geometry)
            for specs in (config.encodings, config.attention.encodings)
        )
        for spec, part in zip(config.encodings, parts_of(on_tokens), strict=False):
            if part.token_width(config.width) != config.width:
                got = f"{spec['name']}, which acts on token ids"
                raise refusal("block", "encodings of hidden states", got, "use it in a decoder")
        super().__init__(config, on_tokens, [encoding])
        self.attention = attention(config.width, config.attention, encoding)
        self.mask = Mask(build("sees", config.attention.sees), encoding)

    def forward(
        self, x: Tensor, places: TokenPlaces, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """x [B,S,E], states to output [B,S,E], new states."""
        before = self.embed_states
        x, carried = self.token_encoding.embed_next(x, places.coordinates, states[:before])
        y, present = self.attention(x, places, self.mask(places, x), states[before:])
        return y, carried + present

    def attentions(self) -> list[Any]:
        """Return a list with the attention of the block."""
        return [self.attention]

    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any]) -> np.ndarray:
        """Compute one row x [n,E] at positions and coordinates to [n,E], float64."""
        rows = self.token_encoding.oracle().embed_rows(x.astype(np.float64), places)
        return np.asarray(self.attention.exact(rows, positions, places))  # type: ignore[operator]
