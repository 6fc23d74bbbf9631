"""One attention as a model of its own: what an engineer drops into a model of theirs."""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.encodings.together import axes_of
from posenc_export.models import from_weights
from posenc_export.models.attention import attention, check_works
from posenc_export.models.config import BlockConfig
from posenc_export.models.from_weights import Array
from posenc_export.models.parts import build
from posenc_export.models.stack import Mask, check_places


class AttentionBlock(torch.nn.Module):
    """One attention with its encodings, from hidden states to hidden states.

    Args:
        config: the block's description.

    Raises:
        ValueError: an encoding that acts on token ids, encodings at a place where they do not act.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.source: Dict[str, Any] = {}  # how to build the same weights again, if there is a way (models.presets)
        self.config = config
        if config.attention.reads_encoder:
            raise ValueError("block: attention to an encoder belongs to a layer of a decoder, got it alone; export the decoder")
        geometry = config.attention.geometry(config.width, config.max_positions)
        self.token_encoding, encoding = (encodings.build_all(specs, geometry) for specs in (config.encodings, config.attention.encodings))
        if self.token_encoding.token_width(config.width) != config.width:
            raise ValueError(f"block: {config.encodings[0]['name']} acts on token ids, got a bare block; use it in a decoder")
        check_places([self.token_encoding], [encoding])
        check_works(self.token_encoding, geometry.causal)
        self.axes = axes_of([self.token_encoding, encoding])
        self.attention = attention(config.width, config.attention, encoding)
        self.mask = Mask(build("sees", config.attention.sees), encoding)
        self.embed_states = len(self.token_encoding.embed_states())

    @classmethod
    def from_weights(
        cls,
        heads: int,
        max_positions: int,
        o: Array,
        q: Optional[Array] = None,
        k: Optional[Array] = None,
        v: Optional[Array] = None,
        qkv: Optional[Array] = None,
        kv_heads: Optional[int] = None,
        encoding: Union[str, Mapping[str, Any]] = "rope",
        layout: Optional[str] = None,
        q_bias: Optional[Array] = None,
        k_bias: Optional[Array] = None,
        v_bias: Optional[Array] = None,
        qkv_bias: Optional[Array] = None,
        o_bias: Optional[Array] = None,
        encoding_weights: Optional[Mapping[str, Array]] = None,
        causal: bool = True,
    ) -> "AttentionBlock":
        """A block with weights of the caller's own, float32, in eval mode. Sizes follow from the weights.

        Args:
            heads, max_positions, causal: as short.block_config; kv_heads too, from the weights where None.
            o: output projection [E,H*D], rows are outputs as in torch.nn.Linear; float32, float16 or bfloat16, of numpy or torch.
            q, k, v: projections [H*D,E], [K*D,E], [K*D,E]; or qkv, the three one behind the other [(H+2K)*D,E].
            encoding: {"name": registry key, parameter: value}, or text as the command takes it.
            layout: of the weights' rotary pairs, "half" or "interleaved": rows are moved to the layout of the encoding. That of the encoding where None.
            q_bias, k_bias, v_bias or qkv_bias, o_bias: one number for each row; 0 for those of q, k, v that are left out beside another.
            encoding_weights: numbers that the encoding was trained with, by the names of its parameters.

        Raises:
            ValueError: weights that are missing, of another shape or dtype, an encoding whose trained numbers are not given, a layout that it has not.
        """
        biases = {"q_bias": q_bias, "k_bias": k_bias, "v_bias": v_bias, "qkv_bias": qkv_bias, "o_bias": o_bias}
        config, parameters = from_weights.packed({"q": q, "k": k, "v": v, "qkv": qkv, "o": o, **biases}, heads, max_positions, kv_heads, encoding, causal)
        block = cls(config)
        from_weights.fill(block, parameters, layout, encoding_weights or {})
        return block.eval()

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S,E], positions [B,S], coordinates [B,S] or [A,B,S], key_positions [B,T], write_index of `ops.append`, states to output [B,S,E] and new states."""
        x, carried = self.token_encoding.embed_next(x, coordinates, states[: self.embed_states])
        mask = self.mask(positions, key_positions, x)
        y, present = self.attention(x, positions, coordinates, key_positions, mask, write_index, states[self.embed_states :])
        return y, carried + present

    @torch.jit.unused
    def attentions(self) -> List[Any]:
        """Its attention."""
        return [self.attention]

    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any], segments: Optional[np.ndarray] = None) -> np.ndarray:
        """One row x [n,E] at positions and coordinates to [n,E], float64."""
        rows = self.token_encoding.oracle().embed_rows(x.astype(np.float64), places)
        return np.asarray(self.attention.exact(rows, positions, places))  # type: ignore[operator]
