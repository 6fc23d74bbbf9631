"""Mistral (Jiang et al. 2023): Llama's architecture; older models have an attention window."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. sliding_window is required: transformers' default is 4096."""
    config.needs("num_key_value_heads")
    rotation, window = config.rotation(), config.window("sliding_window")
    kind = gated.layer(config, gated.attention(config))
    return gated.uniform(config, gated.windowed(config, kind, window), [rotation])


FAMILY = Family(describe, gated.WEIGHTS)
