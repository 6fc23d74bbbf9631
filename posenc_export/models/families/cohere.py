"""Command R (Cohere 2024): parallel sublayers after one LayerNorm, interleaved rotary pairs."""

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Named, Settings, StackConfig
from posenc_export.models.families.shared.rules import OURS, same


def layer_norm(config: Settings) -> Named:
    """Describe LayerNorm without bias."""
    return {**plain.layer_norm(config), "bias": False}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. With use_qk_norm (Command R+), each head has a norm of its own."""
    config.take("model_max_length", None)  # not read by transformers
    rotation = config.rotation(theta=500000.0, layout="interleaved")
    norm, bias = layer_norm(config), config.flag("attention_bias", False)
    attention = gated.attention(config, bias, bias)
    kind = gated.layer(config, attention, residual="parallel", norm=norm)
    if config.flag("use_qk_norm", False):
        each_head = {"name": "layer", "epsilon": norm["epsilon"]}
        kind = kind.with_attention(head_norm={"name": "each", "norm": each_head})
    head = {"scale": config.number("logit_scale")}
    return gated.uniform(config, kind, [rotation], tied=True, head=head)


NORMS = {
    OURS + f"attention.{n}": same(gated.LAYER + f"self_attn.{n}") for n in ("q_norm", "k_norm")
}
FAMILY = Family(describe, {**gated.WEIGHTS, **NORMS})
