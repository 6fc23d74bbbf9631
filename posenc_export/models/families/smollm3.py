"""SmolLM3 (Bakouch et al. 2025): Llama's shape; every fourth layer has no rotation (Yang et al. 2025, Rope to Nope and Back Again)."""

from posenc_export.models.config import StackConfig
from posenc_export.models.families import Family
from posenc_export.models.families.gated import WEIGHTS, attention, decoder, layer, with_attention
from posenc_export.models.families.settings import Settings


def describe(config: Settings) -> StackConfig:
    """no_rope_layers has a 1 where a layer turns; where it is missing, no_rope_layer_interval counts."""
    config.needs("num_key_value_heads")
    config.only("use_sliding_window", False, False)
    for key in ("sliding_window", "max_window_layers"):  # without meaning while use_sliding_window is false
        config.take(key, None)
    config.full_attention()
    rotation, interval = config.rotation(theta=2000000.0), config.whole("no_rope_layer_interval", 4)
    turned = config.per_layer("no_rope_layers", [int((index + 1) % interval != 0) for index in range(config.layers)])
    bias = config.flag("attention_bias", False)
    kind = layer(config, attention(config, bias, bias), mlp_bias=config.flag("mlp_bias", False))
    kinds = {"turned": with_attention(kind, encodings=(rotation,)), "plain": kind}
    order = ["turned" if turns else "plain" for turns in turned]
    return decoder(config, {name: kinds[name] for name in dict.fromkeys(order)}, order, tied=True)


FAMILY = Family(describe, WEIGHTS)
