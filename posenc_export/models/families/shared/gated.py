"""Llama-like decoders: RMSNorm, grouped heads, a gated MLP (Touvron et al. 2023, LLaMA, 2.2)."""

from typing import Any

from posenc_export.models.config import (
    AttentionConfig,
    HeadConfig,
    LayerConfig,
    StackConfig,
    TokensConfig,
)
from posenc_export.models.families.shared.family import layer_of, stack
from posenc_export.models.families.shared.rules import OURS, QKV, Table, joined, same
from posenc_export.models.families.shared.settings import Settings

LAYER = "model.layers.{layer}."
WEIGHTS: Table = {
    "tokens.embedding": same("model.embed_tokens"),
    OURS + "residual.attention_norm": same(LAYER + "input_layernorm"),
    QKV: joined(LAYER + "self_attn.q_proj", LAYER + "self_attn.k_proj", LAYER + "self_attn.v_proj"),
    OURS + "attention.projection.output": same(LAYER + "self_attn.o_proj"),
    OURS + "residual.mlp_norm": same(LAYER + "post_attention_layernorm"),
    OURS + "mlp.gate": same(LAYER + "mlp.gate_proj"),
    OURS + "mlp.up": same(LAYER + "mlp.up_proj"),
    OURS + "mlp.down": same(LAYER + "mlp.down_proj"),
    "norm": same("model.norm"),
    "head.linear": same("lm_head"),
}


def attention(
    config: Settings, bias: bool = False, output_bias: bool = False, **parts: Any
) -> AttentionConfig:
    """Describe attention with the sizes in a config and further fields of AttentionConfig; `sees`
    and encodings are set later. bias, output_bias: of queries, keys and values, and of outputs.
    """
    return AttentionConfig(
        heads=config.heads,
        kv_heads=config.whole("num_key_value_heads", config.heads),
        head_size=config.whole("head_dim", config.width // config.heads),
        projection={"name": "grouped", "bias": bias, "output_bias": output_bias},
        **parts,
    )


def layer(config: Settings, attention: AttentionConfig, mlp_bias: bool = False) -> LayerConfig:
    """Describe a layer with a gated MLP and RMSNorm."""
    norm = {"name": "rms", "epsilon": config.number("rms_norm_eps")}
    mlp = {"name": "gated", "hidden": config.whole("intermediate_size")}
    mlp |= {"activation": config.activation("hidden_act"), "bias": mlp_bias}
    return layer_of(attention, mlp, norm)


def decoder(config: Settings, kind: LayerConfig) -> StackConfig:
    """Describe the whole decoder, with the norm of its layers after the last one."""
    embedding = TokensConfig(vocabulary=config.whole("vocab_size"))
    head = HeadConfig(tied=config.flag("tie_word_embeddings", False))
    order = ["layer"] * config.layers
    return stack(config, {"layer": kind}, order, embedding, norm=kind.norms[0], head=head)
