"""Mistral (Jiang et al. 2023, Mistral 7B): Llama's architecture; older models have an attention
window.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    WEIGHTS,
    alike,
    attention,
    decoder,
    layer,
    windowed,
)


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. A config without sliding_window is refused: the default in
    transformers is 4096.
    """
    config.needs("num_key_value_heads")
    rotation, window = config.rotation(), config.window("sliding_window")
    return decoder(
        config,
        *alike(
            windowed(config, layer(config, attention(config)), window), config.layers, [rotation]
        ),
    )


FAMILY = Family(describe, WEIGHTS)
