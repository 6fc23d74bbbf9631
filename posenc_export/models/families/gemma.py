"""Gemma (Gemma Team 2024): embeddings times sqrt(E), norms with weight 1 + w, GELU in the MLP."""

import math

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import OURS, one_plus


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Like transformers, read hidden_act "gelu" as the tanh approximation."""
    config.needs("num_key_value_heads", "head_dim")
    config.off("use_bidirectional_attention")
    if (other := config.take("hidden_activation", None)) not in (None, "gelu_pytorch_tanh"):
        rule = "hidden_activation to be null or gelu_pytorch_tanh"
        raise config.refusal(rule, other, "remove it, since transformers reads hidden_act")
    rotation, bias = config.rotation(), config.flag("attention_bias", False)
    kind = gated.layer(config, gated.attention(config, bias, bias))
    if kind.mlp["activation"] == "gelu":
        kind = kind.with_mlp(activation="gelu_tanh")
    return gated.uniform(config, kind, [rotation], tied=True, scale=math.sqrt(config.width))


NORMS = {
    OURS + "residual.attention_norm": one_plus(LAYER + "input_layernorm"),
    OURS + "residual.mlp_norm": one_plus(LAYER + "post_attention_layernorm"),
    "norm": one_plus("model.norm"),
}
FAMILY = Family(describe, {**gated.WEIGHTS, **NORMS})
