"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases of queries, keys and values."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. use_sliding_window: a window in layers from max_window_layers on."""
    config.needs("num_key_value_heads")
    config.fixed({"use_mrope": False})
    rotation = config.rotation_in_chunks()
    kind = gated.layer(config, gated.attention(config, bias=True))
    return gated.decoder(config, gated.late_windows(config, kind, rotation, first=28))


FAMILY = Family(describe, gated.WEIGHTS)
