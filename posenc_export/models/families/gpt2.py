"""GPT-2 (Radford et al. 2019): LayerNorm before attention and MLP, learned positions."""

from typing import Any, Dict

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
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
    """Describe the decoder. reorder_and_upcast_attn only affects float16."""
    config.fixed({"add_cross_attention": False})
    config.take("reorder_and_upcast_attn", None)
    mlp = plain.mlp(config, "activation_function", "gelu_new", hidden=4 * config.width)
    norm = plain.layer_norm(config, "layer_norm_epsilon")
    kind = layer_of(plain.attention(config, bias=True), mlp, norm)
    scaled = config.flag("scale_attn_weights", True)
    scale = kind.attention.head_size**-0.5 if scaled else 1.0
    options: Dict[str, Any] = {"tied": True, "encodings": (plain.learned(config),)}
    if config.flag("scale_attn_by_inverse_layer_idx", False):  # scores by the layer's number
        scales = {f"layer_{index}": scale / (index + 1) for index in range(config.layers)}
        kinds = {name: kind.with_attention(scale=value) for name, value in scales.items()}
        return gated.decoder(config, (kinds, tuple(kinds)), **options)
    kind = kind if scaled else kind.with_attention(scale=scale)
    return gated.uniform(config, kind, [], **options)


FAMILY = Family(describe, WEIGHTS, base="transformer.", unused=(r"\.attn\.(masked_)?bias$",))
