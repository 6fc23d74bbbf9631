"""Command R7B and Command A (Cohere 2025): Command R, with rotation in layers with a window."""

from posenc_export.models.families.cohere import layer_norm
from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig

# Keys of published configs that transformers does not read, with the value that all published
# models have.
FIXED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. By default every fourth layer sees all keys, the others a window."""
    config.needs("sliding_window")
    # Distribution of the table over devices in training.
    config.flag("use_parallel_embedding", False)
    config.fixed(FIXED)
    rotation, bias = config.rotation(layout="interleaved"), config.flag("attention_bias", False)
    window, norm = config.window("sliding_window"), layer_norm(config)
    attention = gated.attention(config, bias, bias)
    kind = gated.layer(config, attention, residual="parallel", norm=norm)
    types = config.pattern(4, "layer_switch")
    encodings = {"sliding_attention": [rotation], "full_attention": []}
    layers = config.by_type(kind, encodings, window, types)
    head = {"scale": config.number("logit_scale")}
    return gated.decoder(config, layers, tied=True, head=head)


FAMILY = Family(describe, gated.WEIGHTS)
