"""Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023): GPT-J's layer with biases, partial rotation."""

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import OURS, Table, same

WEIGHTS: Table = {
    **gated.WEIGHTS,
    OURS + "attention.q_norm.norm": same(LAYER + "self_attn.q_layernorm"),
    OURS + "attention.k_norm.norm": same(LAYER + "self_attn.k_layernorm"),
    OURS + "attention.projection.output": same(LAYER + "self_attn.dense"),
    OURS + "mlp.up": same(LAYER + "mlp.fc1"),
    OURS + "mlp.down": same(LAYER + "mlp.fc2"),
    "norm": same("model.final_layernorm"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. qk_layernorm normalises each head of q and k before rotation."""
    rotation, norm = config.rotation(partial=True, share=0.5), plain.layer_norm(config)
    attention = gated.attention(config, bias=True, output_bias=True)
    kind = layer_of(attention, plain.mlp(config, "hidden_act", "gelu_new"), norm, "parallel")
    if config.flag("qk_layernorm", False):
        kind = gated.head_norm(kind)
    return gated.uniform(config, kind, [rotation], head={"bias": True})


FAMILY = Family(describe, WEIGHTS)
