"""Qwen2 and Qwen2.5 (Yang et al. 2024, Qwen2 Technical Report): Llama with biases of queries,
keys and values, and none of the output.
"""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. With use_sliding_window, layers from max_window_layers on have a
    window.
    """
    config.needs("num_key_value_heads")
    config.fixed({"use_mrope": False})
    rotation = config.rotation()
    kind = gated.layer(config, gated.attention(config, bias=True))
    return gated.decoder(config, gated.late_windows(config, kind, rotation, first=28))


FAMILY = Family(describe, gated.WEIGHTS)
