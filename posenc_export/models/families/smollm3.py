"""SmolLM3 (Bakouch et al. 2025): Llama without rotation in every fourth layer (Yang et al. 2025,
Rope to Nope and Back Again).
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    WEIGHTS,
    attention,
    decoder,
    layer,
    with_attention,
)


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. no_rope_layers is 1 for layers with rotation; if it is missing,
    no_rope_layer_interval applies.
    """
    config.needs("num_key_value_heads")
    config.only("use_sliding_window", False, False)
    # No effect while use_sliding_window is false.
    config.ignore(("sliding_window", "max_window_layers"))
    config.full_attention()
    rotation, interval = config.rotation(theta=2000000.0), config.whole("no_rope_layer_interval", 4)
    rotated = config.per_layer(
        "no_rope_layers", [int((index + 1) % interval != 0) for index in range(config.layers)]
    )
    bias = config.flag("attention_bias", False)
    kind = layer(config, attention(config, bias, bias), mlp_bias=config.flag("mlp_bias", False))
    kinds = {"turned": with_attention(kind, encodings=(rotation,)), "plain": kind}
    order = ["turned" if flag else "plain" for flag in rotated]
    return decoder(config, {name: kinds[name] for name in dict.fromkeys(order)}, order, tied=True)


FAMILY = Family(describe, WEIGHTS)
