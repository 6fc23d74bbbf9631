"""GLM-4 (Team GLM 2024): Llama with partial rotation of interleaved pairs, packed gate and up."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.rules import gate_and_up


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. attention_bias applies to queries, keys and values only."""
    config.needs("num_key_value_heads", "head_dim")
    rotation = config.rotation(partial=True, layout="interleaved", share=0.5)
    attention = gated.attention(config, bias=config.flag("attention_bias", True))
    return gated.uniform(config, gated.layer(config, attention), [rotation])


FAMILY = Family(describe, {**gated.WEIGHTS, **gate_and_up(gated.LAYER + "mlp.gate_up_proj")})
