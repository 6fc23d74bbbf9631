"""Llama-like decoders: RMSNorm, grouped heads, a gated MLP (Touvron et al. 2023, LLaMA, 2.2)."""

from types import MappingProxyType
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import msgspec

from posenc_export.models.config import (
    AttentionConfig,
    HeadConfig,
    LayerConfig,
    Named,
    StackConfig,
    TokensConfig,
)
from posenc_export.models.families.shared.family import layer_of, stack
from posenc_export.models.families.shared.rules import OURS, QKV, Table, joined, same
from posenc_export.models.families.shared.settings import Settings
from posenc_export.models.families.shared.typed_keys import REQUIRED

LAYER = "model.layers.{layer}."
WEIGHTS: Table = {
    "tokens.embedding": same("model.embed_tokens"),
    OURS + "residual.attention_norm": same(LAYER + "input_layernorm"),
    QKV: joined(LAYER + "self_attn.q_proj", LAYER + "self_attn.k_proj", LAYER + "self_attn.v_proj"),
    OURS + "attention.projection.output": same(LAYER + "self_attn.o_proj"),
    OURS + "residual.mlp_norm": same(LAYER + "post_attention_layernorm"),
    OURS + "mlp.gate": same(LAYER + "mlp.gate_proj"),
    OURS + "mlp.up": same(LAYER + "mlp.up_proj"),
    OURS + "mlp.down": same(LAYER + "mlp.down_proj"),
    "norm": same("model.norm"),
    "head.linear": same("lm_head"),
}
HEAD_NORMS: Table = {
    OURS + "attention.q_norm.norm": same(LAYER + "self_attn.q_norm"),
    OURS + "attention.k_norm.norm": same(LAYER + "self_attn.k_norm"),
}


def attention(
    config: Settings, bias: bool = False, output_bias: bool = False, **parts: Any
) -> AttentionConfig:
    """Describe attention with the sizes in a config and further fields of AttentionConfig; `sees`
    and encodings are set later. bias, output_bias: of queries, keys and values, and of outputs.
    """
    return AttentionConfig(
        heads=config.heads,
        kv_heads=config.whole("num_key_value_heads", config.heads),
        head_size=config.whole("head_dim", config.width // config.heads),
        projection={"name": "grouped", "bias": bias, "output_bias": output_bias},
        **parts,
    )


def layer(
    config: Settings,
    attention: AttentionConfig,
    activation: str = "hidden_act",
    mlp_bias: bool = False,
    residual: str = "pre",
) -> LayerConfig:
    """Describe a layer with a gated MLP and RMSNorm. activation: key in the config; residual: key
    of parts.PARTS["residual"].
    """
    norm = {"name": "rms", "epsilon": config.number("rms_norm_eps")}
    mlp = {"name": "gated", "hidden": config.whole("intermediate_size")}
    mlp |= {"activation": config.activation(activation), "bias": mlp_bias}
    return layer_of(attention, mlp, norm, residual)


def head_norm(kind: LayerConfig) -> LayerConfig:
    """Return the layer with norms of queries and keys, specified like its first norm."""
    return kind.with_attention(head_norm={"name": "head", "norm": kind.norms[0]})


def with_experts(
    kind: LayerConfig, experts: int, chosen: int, weights: str, **parts: Any
) -> LayerConfig:
    """Return the layer with experts in place of its MLP, with its hidden width and activation."""
    sizes = {"experts": experts, "chosen": chosen, "hidden": kind.mlp["hidden"]}
    unit = {"name": "gated", "activation": kind.mlp["activation"]}
    mlp = {"name": "experts", **sizes, "weights": weights, "unit": unit, **parts}
    return msgspec.structs.replace(kind, mlp=mlp)


def windowed(config: Settings, kind: LayerConfig, window: Optional[int]) -> LayerConfig:
    """Return the layer with an attention window, for families with one window for all layers."""
    if window is None:
        config.full_attention()
        return kind
    config.fixed({"layer_types": ["sliding_attention"] * config.layers})
    return kind.with_attention(sees={"name": "window", "size": window})


def late_windows(
    config: Settings, kind: LayerConfig, rotation: Named, first: int, window: Any = REQUIRED
) -> Tuple[Dict[str, LayerConfig], Sequence[str]]:
    """Return kinds and order of layers, of which those from max_window_layers on have a window with
    use_sliding_window (Qwen). first, window: defaults of max_window_layers and sliding_window;
    without the latter, use_sliding_window needs the key.
    """
    used = config.flag("use_sliding_window", False)
    first = config.integer("max_window_layers", first)  # 0 or less: all layers have a window
    size = config.window("sliding_window", None if window is REQUIRED and not used else window)
    names = ("full_attention", "sliding_attention")
    windowed = used and size is not None
    types = [names[windowed and index >= first] for index in range(config.layers)]
    return config.by_type(kind, [rotation], size if used else None, types)


def decoder(
    config: Settings,
    layers: Tuple[Dict[str, LayerConfig], Sequence[str]],
    tied: bool = False,
    head: Mapping[str, Any] = MappingProxyType({}),
    **tokens: Any,
) -> StackConfig:
    """Describe the whole decoder, with the norm of its first layer after the last one.

    Args:
        layers: kinds of layers by name, and the kind of each layer.
        tied: the family's default of tie_word_embeddings.
        head, tokens: further fields of HeadConfig and TokensConfig.
    """
    kinds, order = layers
    norm = next(iter(kinds.values())).norms[0]
    embedding = TokensConfig(vocabulary=config.whole("vocab_size"), **tokens)
    described = HeadConfig(tied=config.flag("tie_word_embeddings", tied), **head)
    return stack(config, kinds, order, embedding, norm=norm, head=described)


def uniform(
    config: Settings, kind: LayerConfig, in_layers: Sequence[Named], **options: Any
) -> StackConfig:
    """Describe a decoder with one kind of layers and these encodings; options of `decoder`."""
    kind = kind.with_attention(encodings=tuple(in_layers))
    return decoder(config, ({"layer": kind}, ["layer"] * config.layers), **options)
