"""An attention block: one attention layer with its encodings, to export or to use in a module."""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.encodings.shared.combined import coordinates_of
from posenc_export.models import from_weights
from posenc_export.models.attention import attention, check_direction, check_places
from posenc_export.models.config import BlockConfig
from posenc_export.models.from_weights import Array
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

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Array],
        heads: int,
        max_positions: int,
        prefix: str = "",
        kv_heads: Optional[int] = None,
        encoding: Union[str, Mapping[str, Any]] = "rope",
        layout: Optional[str] = None,
        causal: bool = True,
    ) -> "AttentionBlock":
        """Build a block from the state_dict of an attention, such as torch.nn.MultiheadAttention,
        by the names of its tensors, in float32 and eval mode. Sizes follow from their shapes.

        Args:
            state_dict: tensors or numpy arrays by name, float32, float16 or bfloat16; those without
                the prefix are ignored. q [H*D,E], k and v [K*D,E] or qkv, their concatenation, and
                o [E,H*D] as in torch.nn.Linear.weight; q_bias, ...; trained parameters of the
                encoding as encoding.NAME (docs/from-your-weights.md has all names). If only some
                of q, k and v have a bias, the others get 0.
            heads, max_positions, causal: as in short_forms.block_config.
            prefix: beginning of the names of one attention, such as "model.layers.0.self_attn.".
            kv_heads: key and value heads; None infers them from the weights.
            encoding: {"name": registry key, parameter: value}, or text as on the command line.
            layout: layout of rotary pairs in the weights, "half" or "interleaved". Rows are
                reordered to the layout of the encoding. None: the layouts agree.

        Raises:
            ValueError: weights that are missing or have another shape or dtype; a module instead of
                its state_dict; names that are ambiguous or have no place in the block
                (models.named_projections); a layout for an encoding without rotary pairs.
        """
        if isinstance(state_dict, torch.nn.Module):
            got = f"module {type(state_dict).__qualname__}"
            raise refusal("weights", "tensors by name", got, "give its state_dict()")
        shapes = {name: np.shape(value) for name, value in state_dict.items()}
        weights, _ = from_weights.projections(shapes, state_dict.__getitem__, prefix)
        config, parameters = from_weights.pack(
            weights, heads, max_positions, kv_heads, encoding, causal
        )
        block = cls(config)
        from_weights.fill(block, parameters, layout, weights)
        return block.eval()

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
