"""Mistral (Jiang et al. 2023): Llama's architecture; older models have an attention window."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. sliding_window is required: transformers' default is 4096."""
    config.needs("num_key_value_heads")
    kind = gated.layer(config, gated.attention(config, encodings=(config.rotation(),)))
    if (window := config.window("sliding_window")) is None:
        config.full_attention()
        return gated.decoder(config, kind)
    config.fixed({"layer_types": ["sliding_attention"] * config.layers})
    kind = kind.with_attention(sees={"name": "window", "size": window})
    return gated.decoder(config, kind)


FAMILY = Family(describe, gated.WEIGHTS)
