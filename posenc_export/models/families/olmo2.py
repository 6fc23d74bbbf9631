"""OLMo 2 (OLMo Team 2025): norms of the outputs of sublayers, and over all heads of q and k."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import OURS, same


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. attention_bias applies to all four projections."""
    rotation, bias = config.rotation(), config.flag("attention_bias", False)
    kind = gated.layer(config, gated.attention(config, bias, bias), residual="after")
    return gated.uniform(config, gated.head_norm(kind, "projection"), [rotation])


NORMS = {
    OURS + "residual.attention_norm": same(LAYER + "post_attention_layernorm"),
    OURS + "residual.mlp_norm": same(LAYER + "post_feedforward_layernorm"),
}
FAMILY = Family(describe, {**gated.WEIGHTS, **gated.HEAD_NORMS, **NORMS})
