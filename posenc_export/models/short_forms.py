"""Short forms of common descriptions: a block, a decoder or an encoder around one encoding."""

import itertools
from typing import Any, Mapping, Sequence

from msgspec.structs import replace

from posenc_export.encodings import KNOWN, parse
from posenc_export.encodings.shared.base import own_hooks
from posenc_export.models import config
from posenc_export.models.config import require
from posenc_export.shared import registry
from posenc_export.shared.refusal import short_repr

ROPE: Mapping[str, Any] = {"name": "rope"}
Spec = str | Mapping[str, Any]
NORMS = ("rms", "layer")
MLPS = {
    "swiglu": {"name": "gated", "activation": "silu"},
    "gelu": {"name": "plain", "activation": "gelu"},
}


def block_config(
    width: int,
    heads: int,
    max_positions: int,
    kv_heads: int = 0,
    head_size: int = 0,
    encoding: Spec = ROPE,
    qkv_bias: bool = False,
    output_bias: bool = False,
    causal: bool = True,
    mechanism: str = "softmax",
) -> config.BlockConfig:
    """Describe a block around one encoding. The encoding is added to the hidden states if it
    defines `embed`, and is part of the attention otherwise.

    Args:
        width, heads, max_positions, mechanism: as in models.config.
        kv_heads: number of key and value heads; 0 for as many as heads.
        head_size: head size D; 0 for width / heads.
        encoding: {"name": registry key, parameter: value}, or text as on the command line.
        qkv_bias, output_bias: whether the projections have biases.
        causal: hide keys after the query. If False, attention is bidirectional, every call is a
            whole sequence, and there is no cache.

    Raises:
        ValueError: as the classes in models.config; a width not divisible by heads without
            head_size.
    """
    config.check_sizes(width=width, heads=heads)
    divisible = bool(head_size) or width % heads == 0
    require(divisible, "width to be divisible by heads", f"{width} and {heads}", "give head_size")
    on_tokens, in_layers = _placed(encoding)
    attention = config.AttentionConfig(
        heads=heads,
        kv_heads=kv_heads or heads,
        head_size=head_size or width // heads,
        encodings=in_layers,
        sees={"name": "causal" if causal else "both"},
        projection={"name": "grouped", "bias": qkv_bias, "output_bias": output_bias},
        mechanism=mechanism,
    )
    return config.BlockConfig(
        width=width, max_positions=max_positions, attention=attention, encodings=on_tokens
    )


def decoder_config(
    vocabulary: int,
    layers: int,
    hidden: int,
    block: config.BlockConfig,
    norm: str = "rms",
    epsilon: float = 1e-5,
    mlp: str = "swiglu",
    mlp_bias: bool = False,
    tied: bool = True,
    layer_encodings: Sequence[Spec] = (),
) -> config.StackConfig:
    """Describe a decoder with pre-norm layers, which differ at most in their encodings.

    Args:
        vocabulary: number of token ids V.
        layers: number of layers.
        hidden: hidden width of the MLP.
        block: the attention of each layer, and encodings on tokens.
        norm, epsilon: "rms" or "layer", and the epsilon of the norms.
        mlp: "swiglu" or "gelu".
        mlp_bias: whether the MLP has biases.
        tied: whether the head uses the token table.
        layer_encodings: encodings to use in place of the block's; layer i gets entry i modulo their
            number.

    Raises:
        ValueError: as the classes in models.config; an unknown norm or mlp, fewer than 1 layer.
    """
    for name, value, choices in (("norm", norm, NORMS), ("mlp", mlp, tuple(MLPS))):
        rule = f"{name} to be one of {', '.join(choices)}"
        require(value in choices, rule, repr(value), "choose one of these")
    config.check_sizes(layers=layers, hidden=hidden)
    rule, remedy = "block to be a description of a block", "give what block_config returns"
    require(isinstance(block, config.BlockConfig), rule, short_repr(block), remedy)
    norms: dict[str, Any] = {"name": norm, "epsilon": epsilon}
    attentions = _attentions(block.attention, layer_encodings[:layers])
    units = {**MLPS[mlp], "hidden": hidden, "bias": mlp_bias}
    parts: dict[str, Any] = {"residual": {"name": "pre"}, "norms": (norms, norms), "mlp": units}
    kinds = {name: config.LayerConfig(attention=own, **parts) for name, own in attentions.items()}
    return config.StackConfig(
        width=block.width,
        max_positions=block.max_positions,
        tokens=config.TokensConfig(vocabulary=vocabulary, encodings=block.encodings),
        layers=kinds,
        order=tuple(itertools.islice(itertools.cycle(kinds), layers)),
        norm=norms,
        head=config.HeadConfig(tied=tied),
    )


def encoder_config(
    vocabulary: int, layers: int, hidden: int, block: config.BlockConfig, epsilon: float = 1e-12
) -> config.StackConfig:
    """Describe an encoder like BERT without token types: post-norm layers with GELU and biases
    (Devlin et al. 2018).

    Args:
        vocabulary, layers, hidden: as in `decoder_config`.
        block: bidirectional attention of each layer, and encodings on tokens.
        epsilon: epsilon of the norms.

    Raises:
        ValueError: as the classes in models.config; a causal block.
    """
    rule = "bidirectional attention in an encoder"
    require(not block.attention.causal, rule, "causal attention", "give causal=False")
    pre = decoder_config(vocabulary, layers, hidden, block, "layer", epsilon, "gelu", True)
    layer = replace(pre.layers["layer"], residual={"name": "post"})
    tokens = replace(pre.tokens, norm=pre.norm)
    return replace(pre, layers={"layer": layer}, tokens=tokens, norm=None, head=None)


def _placed(encoding: Spec) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    """Return the encodings on tokens and those in layers: the given one at its place."""
    if isinstance(encoding, str):
        encoding = parse(encoding)
    rule, remedy = "an encoding as a name, or a dict with a name", "give several by layer_encodings"
    require(isinstance(encoding, Mapping) and "name" in encoding, rule, repr(encoding), remedy)
    registry.parameters("encoding", KNOWN, encoding["name"])
    spec = (dict(encoding),)
    return (spec, ()) if own_hooks(KNOWN[encoding["name"]], "embed", "embed_next") else ((), spec)


def _attentions(
    attention: config.AttentionConfig, encodings: Sequence[Spec]
) -> dict[str, config.AttentionConfig]:
    """Return the attention with each of the encodings, by name of the kind of layer."""
    if not encodings:
        return {"layer": attention}
    kinds = {}
    for index, (on_tokens, in_layers) in enumerate(map(_placed, encodings)):
        got = f"{', '.join(spec['name'] for spec in on_tokens)}, which acts on tokens"
        rule, remedy = "layer_encodings that act in layers", "give it to the block"
        require(not on_tokens, rule, got, remedy)
        kinds[f"layer_{index}"] = replace(attention, encodings=in_layers)
    return kinds
