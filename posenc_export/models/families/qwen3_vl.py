"""The text model of Qwen3-VL (Qwen 2025): Qwen3 with axes interleaved over the frequencies."""

from posenc_export.models.families.shared import gated, vision
from posenc_export.models.families.shared.family import Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder, without image features that DeepStack adds after the first layers."""
    config.needs("num_key_value_heads", "head_dim")
    rotation = vision.rotation_of_axes(config, 500000.0, (24, 20, 20))
    bias = config.flag("attention_bias", False)
    kind = gated.head_norm(gated.layer(config, gated.attention(config, bias, bias)))
    return gated.uniform(config, kind, [rotation])


FAMILY = vision.text_model(describe, {**gated.WEIGHTS, **gated.HEAD_NORMS}, vision.text_keys)
