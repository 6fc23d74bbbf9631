"""The text model of Qwen2-VL (Wang et al. 2024, 2.1) and Qwen2.5-VL (Bai et al. 2025)."""

from posenc_export.models.families.shared import gated, vision
from posenc_export.models.families.shared.family import Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. use_sliding_window: a window in layers from max_window_layers on."""
    config.needs("num_key_value_heads")
    config.fixed({"head_dim": config.width // config.heads})
    rotation = vision.rotation_of_axes(config, 1000000.0, (16, 24, 24))
    kind = gated.layer(config, gated.attention(config, bias=True))
    return gated.decoder(config, gated.late_windows(config, kind, rotation, first=80))


FAMILY = vision.text_model(describe, gated.WEIGHTS, vision.keys_tied_by_either)
