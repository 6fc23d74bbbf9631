"""The attention block, written once for every encoding and target."""

from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import torch
from torch import Tensor

from posenc_export import encodings, ops
from posenc_export.encodings.base import Carried, PositionEncoding
from posenc_export.models import projections
from posenc_export.models.config import AttentionConfig
from posenc_export.models.linear_attention import LinearAttention
from posenc_export.models.projections import Array


class Attention(torch.nn.Module):
    """Grouped-query attention over a cache: project, rotate, append, attend, project.

    Args:
        config: sizes and biases.
        encoding: acts on queries, keys and scores here; its bias comes with the mask.
    """

    def __init__(self, config: AttentionConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.sizes = [config.heads * config.head_size, config.kv_heads * config.head_size, config.kv_heads * config.head_size]
        self.scale = encoding.score_scale(config.head_size)
        self.encoding = encoding
        self.qkv = torch.nn.Linear(config.width, sum(self.sizes), bias=config.qkv_bias)
        self.output = torch.nn.Linear(self.sizes[0], config.width, bias=config.output_bias)

    @torch.jit.unused
    def states(self) -> List[Carried]:
        """What this attention carries from call to call, in the order `forward` takes."""
        key, value = (self.kv_heads, self.encoding.key_size(self.head_size)), (self.kv_heads, self.head_size)
        return [Carried("key", key, grows=True), Carried("value", value, grows=True), *self.encoding.layer_states()]

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor, mask: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S,E], positions [B,S], coordinates as `rotate` takes them, key_positions [B,T], mask [B,1 or H,S,T], write_index [B], states to x's shape, states."""
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q, k = self.encoding.rotate(ops.split_heads(q, self.heads), ops.split_heads(k, self.kv_heads), coordinates)
        keys = ops.append(states[0], k, write_index)
        values = ops.append(states[1], ops.split_heads(v, self.kv_heads), write_index)
        carried = self.encoding.observe(x, positions, write_index, states[2:])
        y = self.encoding.rescore(q, keys, values, mask, positions, key_positions, self.scale, carried)
        return self.output(y), [keys, values] + carried


class Bidirectional(Attention):
    """Attention of every token of a call to every other: no cache.

    Args:
        config, encoding: as Attention.
    """

    @torch.jit.unused
    def states(self) -> List[Carried]:
        """Nothing."""
        return []

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor, mask: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """Shapes as Attention.forward, T = S."""
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q, k = self.encoding.rotate(ops.split_heads(q, self.heads), ops.split_heads(k, self.kv_heads), coordinates)
        values = ops.split_heads(v, self.kv_heads).transpose(1, 2)
        y = self.encoding.rescore(q, k.transpose(1, 2), values, mask, positions, key_positions, self.scale, states)
        return self.output(y), states


def attention(config: AttentionConfig, encoding: PositionEncoding) -> torch.nn.Module:
    """The attention that a config describes.

    Raises:
        ValueError: an encoding that has no meaning in it.
    """
    kind = "causal" if config.causal else "bidirectional"
    if kind not in encoding.works_in:
        raise ValueError(f"attention: {type(encoding).__name__} works in {encoding.works_in[0]} attention, got {kind}; choose another encoding or attention")
    if config.mechanism == "linear":
        return LinearAttention(config, encoding)
    return Attention(config, encoding) if config.causal else Bidirectional(config, encoding)


def one_or_each(config: AttentionConfig, encoding: PositionEncoding, layers: int) -> List[PositionEncoding]:
    """The encoding of each layer: `encoding` in all of them, or in the first and others of its kind behind it (PositionEncoding.shared)."""
    return [encoding if layer == 0 or encoding.shared else encodings.build(config.encoding, config.geometry) for layer in range(layers)]


class AttentionBlock(torch.nn.Module):
    """One attention with its encoding, from hidden states to hidden states: what an engineer drops into a model of their own.

    Args:
        config: the block's description.

    Raises:
        ValueError: an encoding that acts on token ids.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.source: Dict[str, Any] = {}  # how to build the same weights again, if there is a way (models.presets)
        self.config = config
        self.encoding = encodings.build(config.encoding, config.geometry)
        if self.encoding.token_width(config.width) != config.width:
            raise ValueError(f"block: {config.encoding['name']} acts on token ids, got a bare block; use it in a decoder")
        self.attention = attention(config, self.encoding)
        self.causal, self.embed_states = config.causal, len(self.encoding.embed_states())

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
            heads, max_positions, causal: as AttentionConfig; kv_heads too, from the weights where None.
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
        config, parameters = projections.packed({"q": q, "k": k, "v": v, "qkv": qkv, "o": o, **biases}, heads, max_positions, kv_heads, encoding, causal)
        block = cls(config)
        projections.fill(block, parameters, layout, encoding_weights or {})
        return block.eval()

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S,E], positions [B,S], coordinates [B,S] or [A,B,S], key_positions [B,T], write_index [B], states to output [B,S,E] and new states."""
        x, carried = self.encoding.embed_next(x, coordinates, states[: self.embed_states])
        mask = ops.attention_mask(positions, key_positions, self.encoding.bias(positions, key_positions), self.causal, x)
        y, present = self.attention(x, positions, coordinates, key_positions, mask, write_index, states[self.embed_states :])
        return y, carried + present
