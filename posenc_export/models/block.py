"""An attention block: one attention layer with its encodings, to export or to use in a module."""

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.encodings.shared.combined import coordinates_of
from posenc_export.models.attention import attention, check_direction, check_places
from posenc_export.models.config import BlockConfig
from posenc_export.models.layer import Mask
from posenc_export.models.parts import build
from posenc_export.models.whole_pass import check_dtype, whole_pass
from posenc_export.ops import TokenPlaces
from posenc_export.shared.refusal import refusal


class AttentionBlock(torch.nn.Module):
    """One attention with its encodings: hidden states in, hidden states out.

    Args:
        config: description of the block.

    Raises:
        ValueError: an encoding that needs token ids, encodings at a place where they have no
            effect.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        # How to rebuild the same weights, empty if that is not possible (models.presets).
        self.source: Dict[str, Any] = {}
        self.config = config
        geometry = config.attention.geometry(config.width, config.max_positions)
        self.token_encoding, encoding = (
            encodings.build_all(specs, geometry)
            for specs in (config.encodings, config.attention.encodings)
        )
        if self.token_encoding.token_width(config.width) != config.width:
            got = f"{config.encodings[0]['name']}, which acts on token ids"
            raise refusal("block", "encodings of hidden states", got, "use it in a decoder")
        check_places([self.token_encoding], [encoding])
        check_direction(self.token_encoding, geometry.causal)
        read = coordinates_of([self.token_encoding, encoding])
        self.axes, self.coordinate_range, self.with_position = read
        self.attention = attention(config.width, config.attention, encoding)
        self.mask = Mask(build("sees", config.attention.sees), encoding)
        self.embed_states = len(self.token_encoding.embed_states())

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call `forward`; with x alone compute the output of whole sequences at positions 0 .. S-1,
        as for training. ValueError: as whole_pass and check_dtype.
        """
        check_dtype(self)
        if len(arguments) == 1 and not named:
            return whole_pass(self, *arguments)
        return super().__call__(*arguments, **named)

    def forward(
        self, x: Tensor, places: TokenPlaces, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S,E], states to output [B,S,E], new states."""
        before = self.embed_states
        x, carried = self.token_encoding.embed_next(x, places.coordinates, states[:before])
        y, present = self.attention(x, places, self.mask(places, x), states[before:])
        return y, carried + present

    @torch.jit.unused
    def weight_dtype(self) -> torch.dtype:
        """Return the dtype of weights and activations."""
        reader: Any = self.attention.projection
        dtype: torch.dtype = reader.output.weight.dtype
        return dtype

    @torch.jit.unused
    def attentions(self) -> List[Any]:
        """Return a list with the attention of the block."""
        return [self.attention]

    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any]) -> np.ndarray:
        """Compute one row x [n,E] at positions and coordinates to [n,E], float64."""
        rows = self.token_encoding.oracle().embed_rows(x.astype(np.float64), places)
        return np.asarray(self.attention.exact(rows, positions, places))  # type: ignore[operator]
