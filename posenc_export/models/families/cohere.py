"""Command R (Cohere 2024): parallel attention and MLP after one LayerNorm without bias,
interleaved rotary pairs, scaled logits.
"""

from typing import Any, Dict

from posenc_export.models.families.shared.family import Family, HeadConfig, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    LAYER,
    WEIGHTS,
    alike,
    attention,
    decoder,
    layer,
    with_attention,
)
from posenc_export.models.families.shared.rules import OURS, same


def layer_norm(config: Settings) -> Dict[str, Any]:
    """Describe LayerNorm without bias."""
    return {"name": "layer", "epsilon": config.number("layer_norm_eps"), "bias": False}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. With use_qk_norm (Command R+), each head of queries and keys has a
    norm with separate weights.
    """
    config.take("model_max_length", None)  # not read by transformers
    rotation = config.rotation(theta=500000.0, layout="interleaved")
    norm = layer_norm(config)
    bias = config.flag("attention_bias", False)
    kind = layer(config, attention(config, bias, bias), residual="parallel", norm=norm)
    if config.flag("use_qk_norm", False):
        kind = with_attention(
            kind, head_norm={"name": "each", "norm": {"name": "layer", "epsilon": norm["epsilon"]}}
        )
    return decoder(
        config,
        *alike(kind, config.layers, [rotation]),
        tied=True,
        head=HeadConfig(scale=config.number("logit_scale")),
    )


NORMS = {
    OURS + "attention.q_norm": same(LAYER + "self_attn.q_norm"),
    OURS + "attention.k_norm": same(LAYER + "self_attn.k_norm"),
}
FAMILY = Family(describe, {**WEIGHTS, **NORMS})
