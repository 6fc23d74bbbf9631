"""Gemma 2 (Gemma Team 2024): sandwich norms, softcaps, a window in every second layer."""

import math

from posenc_export.models.config import AttentionConfig
from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import OURS, Table, one_plus

WEIGHTS: Table = {
    **gated.WEIGHTS,
    OURS + "residual.attention_norm": one_plus(LAYER + "input_layernorm"),
    OURS + "residual.attention_output_norm": one_plus(LAYER + "post_attention_layernorm"),
    OURS + "residual.mlp_norm": one_plus(LAYER + "pre_feedforward_layernorm"),
    OURS + "residual.mlp_output_norm": one_plus(LAYER + "post_feedforward_layernorm"),
    "norm": one_plus("model.norm"),
}


def scaled_attention(config: Settings, **parts: object) -> AttentionConfig:
    """Describe attention with scores q k / sqrt(query_pre_attn_scalar)."""
    config.needs("num_key_value_heads", "head_dim", "sliding_window")
    bias = config.flag("attention_bias", False)
    scale = 1 / math.sqrt(config.number("query_pre_attn_scalar"))
    return gated.attention(config, bias, bias, scale=scale, **parts)


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Without layer_types, layers 0, 2, 4, ... have a window."""
    config.off("use_bidirectional_attention")
    # Transformers reads hidden_activation.
    config.fixed({"hidden_act": "gelu_pytorch_tanh"})
    rotation, cap = config.rotation(), config.number_or_none("attn_logit_softcapping", 50.0)
    attention = scaled_attention(config, softcap=cap)
    kind = gated.layer(config, attention, "hidden_activation", residual="sandwich")
    head = {"softcap": config.number_or_none("final_logit_softcapping", 30.0)}
    window = config.window("sliding_window")
    layers = config.by_type(kind, [rotation], window, config.full_every(2))
    return gated.decoder(config, layers, tied=True, head=head, scale=math.sqrt(config.width))


FAMILY = Family(describe, WEIGHTS)
