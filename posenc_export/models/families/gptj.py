"""GPT-J (Wang and Komatsuzaki 2021): parallel sublayers after one norm, a head with bias."""

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
from posenc_export.models.families.shared.rules import OURS, QKV, Table, joined, same

LAYER = "transformer.h.{layer}."
WEIGHTS: Table = {
    "tokens.embedding": same("transformer.wte"),
    OURS + "residual.attention_norm": same(LAYER + "ln_1"),
    QKV: joined(LAYER + "attn.q_proj", LAYER + "attn.k_proj", LAYER + "attn.v_proj"),
    OURS + "attention.projection.output": same(LAYER + "attn.out_proj"),
    OURS + "mlp.up": same(LAYER + "mlp.fc_in"),
    OURS + "mlp.down": same(LAYER + "mlp.fc_out"),
    "norm": same("transformer.ln_f"),
    "head.linear": same("lm_head"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. transformers has no switches `rotary` and `scale_attn_weights`."""
    config.fixed({"rotary": True, "scale_attn_weights": True})
    rotation = {"name": "rope", "rotary": config.whole("rotary_dim", 64), "layout": "interleaved"}
    mlp = plain.mlp(config, "activation_function", "gelu_new", hidden=4 * config.width)
    norm = plain.layer_norm(config, "layer_norm_epsilon")
    kind = layer_of(plain.attention(config, bias=False), mlp, norm, "parallel")
    return gated.uniform(config, kind, [rotation], head={"bias": True})


FAMILY = Family(describe, WEIGHTS, base="transformer.", unused=(r"\.attn\.(masked_)?bias$",))
