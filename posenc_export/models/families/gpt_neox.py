"""GPT-NeoX (Black et al. 2022, 2.1), Pythia (Biderman et al. 2023): parallel, partial rotation."""

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
from posenc_export.models.families.shared.rules import Table, same

WEIGHTS: Table = {
    "tokens.embedding": same("gpt_neox.embed_in"),
    **plain.megatron_layer("gpt_neox.layers.{layer}.", "attention."),
    "norm": same("gpt_neox.final_layer_norm"),
    "head.linear": same("embed_out"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. By default attention and MLP both read the input of the layer."""
    config.take("is_decoder", None)
    config.rename("rotary_emb_base", "rope_theta")
    config.rename("rotary_pct", "partial_rotary_factor")
    rotation = config.rotation(partial=True, share=0.25)
    residual = "parallel_norms" if config.flag("use_parallel_residual", True) else "pre"
    attention = plain.attention(config, config.flag("attention_bias", True))
    mlp = plain.mlp(config, "hidden_act", "gelu")
    kind = layer_of(attention, mlp, plain.layer_norm(config), residual)
    return gated.uniform(config, kind, [rotation])


FAMILY = Family(describe, WEIGHTS, base="gpt_neox.", unused=(r"\.attention\.(masked_)?bias$",))
