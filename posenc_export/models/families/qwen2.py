"""Qwen2 and Qwen2.5 (Yang et al. 2024, Qwen2 Technical Report): Llama's shape; queries, keys and values have biases, the output has none."""

from posenc_export.models.config import DecoderConfig
from posenc_export.models.families.gated import WEIGHTS, gated
from posenc_export.models.families.settings import Settings

__all__ = ["WEIGHTS", "describe"]


def describe(config: Settings) -> DecoderConfig:
    """sliding_window has no meaning while use_sliding_window is false."""
    config.needs("num_key_value_heads")
    config.only("use_sliding_window", False, False)
    config.only("use_mrope", False, False)
    config.take("sliding_window", None)
    config.full_attention()
    return gated(config, config.rotation(), qkv_bias=True)
