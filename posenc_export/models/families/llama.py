"""Llama 1 to 3 (Touvron et al. 2023; Grattafiori et al. 2024) and other models saved as Llama."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. attention_bias applies to all four projections."""
    # Key of SmolLM2; transformers always uses layout half.
    config.fixed({"rope_interleaved": False})
    rotation, bias = config.rotation(), config.flag("attention_bias", False)
    attention = gated.attention(config, bias, bias, encodings=(rotation,))
    return gated.decoder(config, gated.layer(config, attention, config.flag("mlp_bias", False)))


FAMILY = Family(describe, gated.WEIGHTS)
