"""SmolLM3 (Bakouch et al. 2025): Llama's shape; every fourth layer has no rotation (Yang et al. 2025, Rope to Nope and Back Again)."""

from posenc_export.models.config import DecoderConfig
from posenc_export.models.families.gated import WEIGHTS, gated
from posenc_export.models.families.settings import Settings
from posenc_export.models.hugging_face import layer_encodings

__all__ = ["WEIGHTS", "describe"]


def describe(config: Settings) -> DecoderConfig:
    """no_rope_layers has a 1 where a layer turns; where it is missing, no_rope_layer_interval counts."""
    config.needs("num_key_value_heads")
    config.only("use_sliding_window", False, False)
    config.take("sliding_window", None)
    config.full_attention()
    keys, interval, turned = config.rotation_keys(theta=2000000.0), config.whole("no_rope_layer_interval", 4), config.take("no_rope_layers", None)
    if turned is None:
        turned = [int((layer + 1) % interval != 0) for layer in range(keys["num_hidden_layers"])]
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return gated(
        config, {"name": "nope"}, layer_encodings({**keys, "no_rope_layers": turned}), qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, tied=True
    )
