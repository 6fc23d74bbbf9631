"""SmolLM3 (Bakouch et al. 2025): Llama without rotation in every fourth layer."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. no_rope_layers is 1 for layers with rotation."""
    config.needs("num_key_value_heads")
    config.fixed({"use_sliding_window": False})
    # No effect while use_sliding_window is false.
    config.ignore(("sliding_window", "max_window_layers"))
    config.full_attention()
    rotation, interval = config.rotation(theta=2000000.0), config.whole("no_rope_layer_interval", 4)
    default = [int((index + 1) % interval != 0) for index in range(config.layers)]
    rotated = config.per_layer("no_rope_layers", default)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    kind = gated.layer(config, gated.attention(config, bias, bias), mlp_bias=mlp_bias)
    kinds = {"turned": kind.with_attention(encodings=(rotation,)), "plain": kind}
    order = ["turned" if flag else "plain" for flag in rotated]
    return gated.of_kinds(config, kinds, order, tied=True)


FAMILY = Family(describe, gated.WEIGHTS)
