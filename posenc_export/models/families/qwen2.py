"""Qwen2 and Qwen2.5 (Yang et al. 2024, Qwen2 Technical Report): Llama with biases of queries,
keys and values, and none of the output.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    WEIGHTS,
    attention,
    decoder,
    late_windows,
    layer,
)


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. With use_sliding_window, layers from max_window_layers on have a
    window.
    """
    config.needs("num_key_value_heads")
    config.only("use_mrope", False, False)
    rotation = config.rotation()
    return decoder(
        config,
        *late_windows(config, layer(config, attention(config, bias=True)), rotation, first=28),
    )


FAMILY = Family(describe, WEIGHTS)
