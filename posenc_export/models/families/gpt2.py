"""GPT-2 (Radford et al. 2019, Language Models are Unsupervised Multitask Learners): LayerNorm
before attention and MLP, learned positions.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import alike, decoder, with_attention
from posenc_export.models.families.shared.plain import attention, layer, layer_norm, learned
from posenc_export.models.families.shared.rules import OURS, QKV, Table, same, transposed

LAYER = "transformer.h.{layer}."
WEIGHTS: Table = {
    "tokens.embedding": same("transformer.wte"),
    "token_encoding.table": same("transformer.wpe"),
    OURS + "residual.attention_norm": same(LAYER + "ln_1"),
    QKV: transposed(LAYER + "attn.c_attn"),
    OURS + "attention.projection.output": transposed(LAYER + "attn.c_proj"),
    OURS + "residual.mlp_norm": same(LAYER + "ln_2"),
    OURS + "mlp.up": transposed(LAYER + "mlp.c_fc"),
    OURS + "mlp.down": transposed(LAYER + "mlp.c_proj"),
    "norm": same("transformer.ln_f"),
    "head.linear": same("lm_head"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder.

    scale_attn_by_inverse_layer_idx divides scores by the number of the layer, from 1.
    reorder_and_upcast_attn only affects float16.
    """
    config.only("add_cross_attention", False, False)
    config.take("reorder_and_upcast_attn", None)
    hidden = config.whole("intermediate_size", 4 * config.width)
    activation = config.activation("activation_function", "gelu_new")
    kind = layer(
        attention(config, bias=True), layer_norm(config, "layer_norm_epsilon"), hidden, activation
    )
    scaled = config.flag("scale_attn_weights", True)
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    scale = kind.attention.head_size**-0.5 if scaled else 1.0
    kinds, order = alike(with_attention(kind, scale=None if scaled else scale), config.layers, [])
    if by_layer:
        kinds = {
            f"layer_{index}": with_attention(kind, scale=scale / (index + 1))
            for index in range(config.layers)
        }
        order = tuple(kinds)
    return decoder(config, kinds, order, tied=True, encodings=(learned(config),))


FAMILY = Family(describe, WEIGHTS, base="transformer.", unused=(r"\.attn\.(masked_)?bias$",))
