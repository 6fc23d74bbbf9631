"""Gemma (Gemma Team 2024, Open Models Based on Gemini Research and Technology): embeddings times
sqrt(E), norms with weight 1 + w, GELU in the gated MLP.
"""

import math

import msgspec

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    LAYER,
    WEIGHTS,
    alike,
    attention,
    decoder,
    layer,
)
from posenc_export.models.families.shared.rules import OURS, one_plus


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Like transformers, read hidden_act "gelu" of the first checkpoints
    as the tanh approximation.
    """
    config.needs("num_key_value_heads", "head_dim")
    config.off("use_bidirectional_attention")
    if config.take("hidden_activation", None) not in (None, "gelu_pytorch_tanh"):
        rule = "expected hidden_activation to be null or gelu_pytorch_tanh"
        raise ValueError(
            f"gemma: {rule}, got another value; remove it, since transformers reads hidden_act"
        )
    rotation, bias = config.rotation(), config.flag("attention_bias", False)
    kind = layer(config, attention(config, bias, bias))
    if kind.mlp["activation"] == "gelu":
        kind = msgspec.structs.replace(kind, mlp={**kind.mlp, "activation": "gelu_tanh"})
    return decoder(
        config, *alike(kind, config.layers, [rotation]), tied=True, scale=math.sqrt(config.width)
    )


NORMS = {
    OURS + "residual.attention_norm": one_plus(LAYER + "input_layernorm"),
    OURS + "residual.mlp_norm": one_plus(LAYER + "post_attention_layernorm"),
    "norm": one_plus("model.norm"),
}
FAMILY = Family(describe, {**WEIGHTS, **NORMS})
