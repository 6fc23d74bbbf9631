"""Mistral (Jiang et al. 2023, Mistral 7B): Llama's shape; a window of keys, which must not be felt within the range."""

from posenc_export.models.config import DecoderConfig
from posenc_export.models.families.gated import WEIGHTS, gated
from posenc_export.models.families.settings import Settings

__all__ = ["WEIGHTS", "describe"]


def describe(config: Settings) -> DecoderConfig:
    """No biases. A config without sliding_window is refused: transformers would take 4096."""
    config.needs("num_key_value_heads")
    config.window("sliding_window")
    config.full_attention()
    return gated(config, config.rotation())
