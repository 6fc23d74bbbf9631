"""Llama 1 to 3 (Touvron et al. 2023, LLaMA; Grattafiori et al. 2024, The Llama 3 Herd of Models) and what is saved in its shape."""

from posenc_export.models.config import DecoderConfig
from posenc_export.models.families.gated import WEIGHTS, gated
from posenc_export.models.families.settings import Settings

__all__ = ["WEIGHTS", "describe"]


def describe(config: Settings) -> DecoderConfig:
    """With attention_bias, all four projections have one."""
    config.only("rope_interleaved", False, False)  # SmolLM2 names it; transformers turns halves
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return gated(config, config.rotation(), qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
