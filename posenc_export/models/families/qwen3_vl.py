"""The text model of Qwen3-VL (Qwen 2025, Qwen3-VL Technical Report): Qwen3 with rotation by
time, height and width, interleaved over the frequencies.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    HEAD_NORMS,
    WEIGHTS,
    alike,
    attention,
    decoder,
    head_norm,
    layer,
)
from posenc_export.models.families.shared.vision import BASES, UNUSED, rotation_of_axes, text_keys


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. head_dim is required: transformers' default is 128. Image features
    that DeepStack adds after the first layers are not supported.
    """
    config.needs("num_key_value_heads", "head_dim")
    rotation = rotation_of_axes(config, 500000.0, (24, 20, 20))
    bias = config.flag("attention_bias", False)
    kind = head_norm(layer(config, attention(config, bias, bias)), "head")
    return decoder(config, *alike(kind, config.layers, [rotation]))


FAMILY = Family(
    describe, {**WEIGHTS, **HEAD_NORMS}, unused=UNUSED, other_bases=BASES, keys=text_keys
)
