"""The text model of GLM-4.1V and GLM-4.6V (GLM-V Team 2025): four norms, rotation by axes."""

from posenc_export.models.families.shared import gated, vision
from posenc_export.models.families.shared.family import Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import OURS, Table, gate_and_up, same

WEIGHTS: Table = {
    **gated.WEIGHTS,
    **gate_and_up(LAYER + "mlp.gate_up_proj"),
    OURS + "residual.attention_output_norm": same(LAYER + "post_self_attn_layernorm"),
    OURS + "residual.mlp_norm": same(LAYER + "post_attention_layernorm"),
    OURS + "residual.mlp_output_norm": same(LAYER + "post_mlp_layernorm"),
}


def decoder(config: Settings, bias: bool) -> StackConfig:
    """Describe the decoder. bias: whether queries, keys and values have biases."""
    rotation = vision.rotation_of_axes(config, 10000.0, (8, 12, 12), partial=True)
    kind = gated.layer(config, gated.attention(config, bias), residual="sandwich")
    return gated.uniform(config, kind, [{**rotation, "layout": "interleaved"}])


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. transformers reads head_dim only for the rotation."""
    config.needs("num_key_value_heads")
    config.fixed({"head_dim": config.width // config.heads})
    return decoder(config, bias=True)


FAMILY = vision.text_model(describe, WEIGHTS, vision.keys_tied_by_either)
