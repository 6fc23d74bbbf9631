"""GLM-4 (Team GLM 2024, ChatGLM: A Family of Large Language Models): Llama with partial
rotation, interleaved rotary pairs, and packed gate and up.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    LAYER,
    WEIGHTS,
    alike,
    attention,
    decoder,
    layer,
)
from posenc_export.models.families.shared.rules import gate_and_up


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. attention_bias applies to queries, keys and values, not to the
    output.
    """
    config.needs("num_key_value_heads", "head_dim")
    rotation = config.rotation(partial=True, layout="interleaved", share=0.5)
    kind = layer(config, attention(config, bias=config.flag("attention_bias", True)))
    return decoder(config, *alike(kind, config.layers, [rotation]))


FAMILY = Family(describe, {**WEIGHTS, **gate_and_up(LAYER + "mlp.gate_up_proj")})
