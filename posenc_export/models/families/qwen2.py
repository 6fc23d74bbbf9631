"""Qwen2 and Qwen2.5 (Yang et al. 2024, Qwen2 Technical Report): Llama with biases of queries, keys and values, and none of the output."""

from posenc_export.models.config import StackConfig
from posenc_export.models.families.shared.family import Family
from posenc_export.models.families.shared.gated import WEIGHTS, attention, decoder, layer
from posenc_export.models.families.shared.settings import Settings


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. With use_sliding_window, layers from max_window_layers on have a window."""
    config.needs("num_key_value_heads")
    config.only("use_mrope", False, False)
    used, first = config.flag("use_sliding_window", False), config.whole("max_window_layers", 28)
    if used:  # transformers' default is 4096
        config.needs("sliding_window")
    rotation, window = config.rotation(), config.window("sliding_window", None)
    kind = layer(config, attention(config, bias=True))
    types = ["sliding_attention" if used and window is not None and index >= first else "full_attention" for index in range(config.layers)]
    return decoder(config, *config.by_type(kind, [rotation], window if used else None, types))


FAMILY = Family(describe, WEIGHTS)
