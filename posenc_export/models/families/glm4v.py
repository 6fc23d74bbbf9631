"""The text model of GLM-4.1V and GLM-4.6V (GLM-V Team 2025, GLM-4.1V-Thinking): four norms,
packed gate and up, rotation by time, height and width.
"""

from posenc_export.models.families.shared.family import (
    Family,
    LayerConfig,
    Named,
    Settings,
    StackConfig,
)
from posenc_export.models.families.shared.gated import LAYER, alike, attention, decoder, layer
from posenc_export.models.families.shared.gated import WEIGHTS as SHARED
from posenc_export.models.families.shared.rules import OURS, Table, gate_and_up, same
from posenc_export.models.families.shared.vision import (
    BASES,
    UNUSED,
    keys_tied_by_either,
    rotation_of_axes,
)

WEIGHTS: Table = {
    **SHARED,
    **gate_and_up(LAYER + "mlp.gate_up_proj"),
    OURS + "residual.attention_output_norm": same(LAYER + "post_self_attn_layernorm"),
    OURS + "residual.mlp_norm": same(LAYER + "post_attention_layernorm"),
    OURS + "residual.mlp_output_norm": same(LAYER + "post_mlp_layernorm"),
}


def rotation(config: Settings) -> Named:
    """Return the rotation: interleaved rotary pairs, and in published models half of each head."""
    return {**rotation_of_axes(config, 10000.0, (8, 12, 12), partial=True), "layout": "interleaved"}


def sandwich(config: Settings, bias: bool) -> LayerConfig:
    """Describe a layer with four norms.

    Args:
        bias: whether queries, keys and values have biases.
    """
    return layer(config, attention(config, bias), residual="sandwich")


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. The head size is width / heads; transformers reads head_dim only for
    the rotation.
    """
    config.needs("num_key_value_heads")
    config.only("head_dim", config.width // config.heads, config.width // config.heads)
    axes_rotation = rotation(config)
    return decoder(config, *alike(sandwich(config, bias=True), config.layers, [axes_rotation]))


FAMILY = Family(describe, WEIGHTS, unused=UNUSED, other_bases=BASES, keys=keys_tied_by_either)
