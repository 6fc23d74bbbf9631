"""StableLM (Bellagente et al. 2024, Stable LM 2 1.6B Technical Report): LayerNorm, a gated MLP,
rotation of a quarter of each head.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    LAYER,
    WEIGHTS,
    alike,
    attention,
    decoder,
    layer,
    with_attention,
)
from posenc_export.models.families.shared.rules import OURS, stacked


def describe(config: Settings) -> StackConfig:
    """Describe the decoder.

    With qk_layernorm, each head of queries and keys has a norm with separate weights. With
    use_parallel_residual, attention and MLP are parallel after one norm.
    """
    config.needs("num_key_value_heads")
    rotation = config.rotation(partial=True, share=0.25)
    size = config.width // config.heads
    config.only("head_dim", size, size)
    norm = {"name": "layer", "epsilon": config.number("layer_norm_eps")}
    residual = "parallel" if config.flag("use_parallel_residual", False) else "pre"
    kind = layer(
        config,
        attention(config, bias=config.flag("use_qkv_bias", False)),
        residual=residual,
        norm=norm,
    )
    if config.flag("qk_layernorm", False):
        kind = with_attention(kind, head_norm={"name": "each", "norm": norm})
    return decoder(config, *alike(kind, config.layers, [rotation]))


NORMS = {
    OURS + "attention.q_norm.weight": stacked(LAYER + "self_attn.q_layernorm.norms.{row}.weight"),
    OURS + "attention.k_norm.weight": stacked(LAYER + "self_attn.k_layernorm.norms.{row}.weight"),
}
FAMILY = Family(describe, {**WEIGHTS, **NORMS})
