"""Qwen3 (Yang et al. 2025): Llama with RMSNorm over each head of queries and keys."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. head_dim is required: transformers' default is 128."""
    config.needs("num_key_value_heads", "head_dim")
    rotation, bias = config.rotation_in_chunks(), config.flag("attention_bias", False)
    kind = gated.head_norm(gated.layer(config, gated.attention(config, bias, bias)))
    return gated.decoder(config, gated.late_windows(config, kind, rotation, first=28, window=4096))


FAMILY = Family(describe, {**gated.WEIGHTS, **gated.HEAD_NORMS})
