"""Llama 1 to 3 (Touvron et al. 2023, LLaMA; Grattafiori et al. 2024, The Llama 3 Herd of Models)
and other models saved as Llama.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import WEIGHTS, alike, attention, decoder, layer


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. attention_bias applies to all four projections."""
    # Key of SmolLM2; transformers always uses layout half.
    config.only("rope_interleaved", False, False)
    rotation, bias = config.rotation(), config.flag("attention_bias", False)
    kind = layer(config, attention(config, bias, bias), mlp_bias=config.flag("mlp_bias", False))
    return decoder(config, *alike(kind, config.layers, [rotation]))


FAMILY = Family(describe, WEIGHTS)
