"""StableLM (Bellagente et al. 2024): LayerNorm, a gated MLP, rotation of a quarter of each head."""

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.rules import OURS, stacked


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. With use_parallel_residual, it is parallel after one norm."""
    config.needs("num_key_value_heads")
    rotation = config.rotation(partial=True, share=0.25)
    config.fixed({"head_dim": config.width // config.heads})
    norm = plain.layer_norm(config)
    residual = "parallel" if config.flag("use_parallel_residual", False) else "pre"
    attention = gated.attention(config, bias=config.flag("use_qkv_bias", False))
    kind = gated.layer(config, attention, residual=residual, norm=norm)
    if config.flag("qk_layernorm", False):
        kind = gated.head_norm(kind, "each")
    return gated.uniform(config, kind, [rotation])


NORMS = {
    OURS + f"attention.{name}_norm.weight": stacked(
        gated.LAYER + f"self_attn.{name}_layernorm.norms.{{row}}.weight"
    )
    for name in "qk"
}
FAMILY = Family(describe, {**gated.WEIGHTS, **NORMS})
