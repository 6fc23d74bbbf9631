"""The text model of Qwen2-VL and Qwen2.5-VL (Wang et al. 2024, Qwen2-VL, 2.1; Bai et al. 2025,
Qwen2.5-VL): Qwen2 with rotation by time, height and width.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    WEIGHTS,
    attention,
    decoder,
    late_windows,
    layer,
)
from posenc_export.models.families.shared.vision import (
    BASES,
    UNUSED,
    keys_tied_by_either,
    rotation_of_axes,
)


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Without layer_types but with use_sliding_window, layers from
    max_window_layers on have a window.
    """
    config.needs("num_key_value_heads")
    size = config.width // config.heads
    config.only("head_dim", size, size)
    rotation = rotation_of_axes(config, 1000000.0, (16, 24, 24))
    return decoder(
        config,
        *late_windows(config, layer(config, attention(config, bias=True)), rotation, first=80),
    )


FAMILY = Family(describe, WEIGHTS, unused=UNUSED, other_bases=BASES, keys=keys_tied_by_either)
