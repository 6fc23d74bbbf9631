"""Short forms of the descriptions that are needed most: a block, a decoder, an encoder around one encoding."""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import msgspec

from posenc_export import registry
from posenc_export.encodings import KNOWN, PositionEncoding
from posenc_export.models.config import AttentionConfig, BlockConfig, HeadConfig, LayerConfig, StackConfig, TokensConfig

ROPE: Mapping[str, Any] = {"name": "rope"}
NORMS = ("rms", "layer")
MLPS = {"swiglu": {"name": "gated", "activation": "silu"}, "gelu": {"name": "plain", "activation": "gelu"}}


def block_config(
    width: int,
    heads: int,
    max_positions: int,
    kv_heads: int = 0,
    head_size: int = 0,
    encoding: Mapping[str, Any] = ROPE,
    qkv_bias: bool = False,
    output_bias: bool = False,
    causal: bool = True,
    mechanism: str = "softmax",
) -> BlockConfig:
    """A block around one encoding, which is put where it acts.

    Args:
        width, heads, max_positions, mechanism: as in the descriptions.
        kv_heads: key and value heads; as many as heads where 0.
        head_size: width / heads where 0.
        encoding: {"name": registry key, parameter: value}.
        qkv_bias, output_bias: biases on the projections.
        causal: keys after the query are hidden; where False, every call is a whole sequence and there is no cache.

    Raises:
        ValueError: as the descriptions; a width not divisible by heads where head_size is not given.
    """
    if not head_size and heads > 0 and width % heads:
        raise ValueError(f"config: width is divisible by heads, got {width} and {heads}; or give head_size")
    on_tokens, in_layers = _placed(encoding)
    attention = AttentionConfig(
        heads=heads,
        kv_heads=kv_heads or heads,
        head_size=head_size or width // max(heads, 1),
        encodings=in_layers,
        sees={"name": "causal" if causal else "both"},
        projection={"name": "grouped", "bias": qkv_bias, "output_bias": output_bias},
        mechanism=mechanism,
    )
    return BlockConfig(width=width, max_positions=max_positions, attention=attention, encodings=on_tokens)


def decoder_config(
    vocabulary: int,
    layers: int,
    hidden: int,
    block: BlockConfig,
    norm: str = "rms",
    epsilon: float = 1e-5,
    mlp: str = "swiglu",
    mlp_bias: bool = False,
    tied: bool = True,
    layer_encodings: Sequence[Mapping[str, Any]] = (),
) -> StackConfig:
    """Pre-norm layers, all alike, between a token table and a head.

    Args:
        vocabulary: number of token ids.
        layers: how many.
        hidden: inner width of the MLP.
        block: the attention of each layer, and what acts on tokens.
        norm: "rms" or "layer".
        epsilon: of the norms.
        mlp: "swiglu" or "gelu".
        mlp_bias: biases in the MLP.
        tied: the head reads the token table.
        layer_encodings: the encoding of the layers, in turn and over again, instead of that of the block's attention.

    Raises:
        ValueError: as the descriptions; an unknown norm or mlp, a number of layers below 1.
    """
    for name, value, choices in (("norm", norm, NORMS), ("mlp", mlp, tuple(MLPS))):
        if value not in choices:
            raise ValueError(f"config: {name} is one of {', '.join(choices)}, got {value!r}")
    if layers < 1:
        raise ValueError(f"config: layers is at least 1, got {layers}")
    norms: Dict[str, Any] = {"name": norm, "epsilon": epsilon}
    kinds, order = {}, []
    for layer in range(layers):
        turn = layer % len(layer_encodings) if layer_encodings else 0
        encodings = _of_layer(layer_encodings[turn]) if layer_encodings else block.attention.encodings
        name = f"layer_{turn}" if layer_encodings else "layer"
        kinds[name] = LayerConfig(
            residual={"name": "pre"},
            norms=(norms, norms),
            attention=msgspec.structs.replace(block.attention, encodings=encodings),
            mlp={**MLPS[mlp], "hidden": hidden, "bias": mlp_bias},
        )
        order.append(name)
    tokens = TokensConfig(vocabulary=vocabulary, encodings=block.encodings)
    return _stack(block, tokens, kinds, order, norms, HeadConfig(tied=tied))


def encoder_config(vocabulary: int, layers: int, hidden: int, block: BlockConfig, segments: int = 2, epsilon: float = 1e-12) -> StackConfig:
    """Post-norm layers over tokens and segments, with GELU and biases: BERT's shape (Devlin et al. 2018).

    Args:
        vocabulary, layers, hidden, block: as `decoder_config`; the block sees both ways.
        segments: number of token types.
        epsilon: of the norms.

    Raises:
        ValueError: as the descriptions; a causal block.
    """
    if block.attention.causal:
        raise ValueError("config: an encoder's attention sees both ways, got another; give causal=False")
    if layers < 1 or segments < 1:
        raise ValueError(f"config: layers and segments are at least 1, got {layers} and {segments}")
    norm: Dict[str, Any] = {"name": "layer", "epsilon": epsilon}
    mlp = {**MLPS["gelu"], "hidden": hidden, "bias": True}
    layer = LayerConfig(residual={"name": "post"}, norms=(norm, norm), attention=block.attention, mlp=mlp)
    tokens = TokensConfig(vocabulary=vocabulary, encodings=block.encodings, segments=segments, norm=norm)
    return _stack(block, tokens, {"layer": layer}, ["layer"] * layers, None, None)


def _stack(
    block: BlockConfig, tokens: TokensConfig, kinds: Dict[str, LayerConfig], order: List[str], norm: Optional[Dict[str, Any]], head: Optional[HeadConfig]
) -> StackConfig:
    return StackConfig(width=block.width, max_positions=block.max_positions, tokens=tokens, layers=kinds, order=tuple(order), norm=norm, head=head)


def _placed(encoding: Mapping[str, Any]) -> Tuple[Tuple[Dict[str, Any], ...], Tuple[Dict[str, Any], ...]]:
    """The encodings on tokens, and those in layers: one of the two has it."""
    registry.parameters("encoding", KNOWN, encoding.get("name", ""))
    cls, spec = KNOWN[encoding["name"]], (dict(encoding),)
    on_tokens = any(getattr(cls, hook) is not getattr(PositionEncoding, hook) for hook in ("embed", "embed_next"))
    return (spec, ()) if on_tokens else ((), spec)


def _of_layer(encoding: Mapping[str, Any]) -> Tuple[Dict[str, Any], ...]:
    on_tokens, in_layers = _placed(encoding)
    if on_tokens:
        raise ValueError(f"config: layer_encodings act in layers, got {encoding['name']}, which acts on tokens; give it to the block")
    return in_layers
