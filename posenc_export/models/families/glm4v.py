"""GLM-4.1V and GLM-4.6V, their text model (GLM-V Team 2025, GLM-4.1V-Thinking): four norms, gate and up packed; time, height and width turn."""

from posenc_export.models.config import LayerConfig, Named, StackConfig
from posenc_export.models.families import Family
from posenc_export.models.families.gated import LAYER, OURS, alike, attention, decoder, layer
from posenc_export.models.families.gated import WEIGHTS as SHARED
from posenc_export.models.families.glm import PACKED
from posenc_export.models.families.rules import Same, Table
from posenc_export.models.families.settings import Settings
from posenc_export.models.families.vision import BASES, UNUSED, keys_tied_by_either, rotation_of_axes

WEIGHTS: Table = {
    **SHARED,
    **PACKED,
    OURS + "residual.attention_output_norm": Same(LAYER + "post_self_attn_layernorm"),
    OURS + "residual.mlp_norm": Same(LAYER + "post_attention_layernorm"),
    OURS + "residual.mlp_output_norm": Same(LAYER + "post_mlp_layernorm"),
}


def rotation(config: Settings) -> Named:
    """Neighbours are pairs; published models turn half of each head."""
    return {**rotation_of_axes(config, 10000.0, (8, 12, 12), partial=True), "layout": "interleaved"}


def sandwich(config: Settings, bias: bool) -> LayerConfig:
    """A layer with four norms.

    Args:
        bias: of queries, keys and values.
    """
    return layer(config, attention(config, bias), residual="sandwich", norms=4)


def describe(config: Settings) -> StackConfig:
    """Heads share the width: transformers reads head_dim for the rotation alone."""
    config.needs("num_key_value_heads")
    config.only("head_dim", config.width // config.heads, config.width // config.heads)
    turned = rotation(config)
    return decoder(config, *alike(sandwich(config, bias=True), config.layers, [turned]))


FAMILY = Family(describe, WEIGHTS, unused=UNUSED, other_bases=BASES, keys=keys_tied_by_either)
