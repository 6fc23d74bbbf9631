"""Falcon (Almazrouei et al. 2023, The Falcon Series of Open Language Models): parallel attention
and MLP, few key heads; ALiBi in older models.
"""

from typing import Any, Mapping

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import alike, decoder
from posenc_export.models.families.shared.plain import attention, layer, layer_norm, megatron_layer
from posenc_export.models.families.shared.rules import OURS, Table, same

LAYER = "transformer.h.{layer}."
WEIGHTS: Table = {
    "tokens.embedding": same("transformer.word_embeddings"),
    **megatron_layer(LAYER),
    "norm": same("transformer.ln_f"),
    "head.linear": same("lm_head"),
}


def norms(description: StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules for the norms of a layer, whose names depend on whether attention and MLP
    have separate norms.
    """
    apart = description.kinds[0].residual["name"] == "parallel_norms"
    first, second = (
        ("ln_attn", "ln_mlp") if apart else ("input_layernorm", "post_attention_layernorm")
    )
    return {
        OURS + "residual.attention_norm": same(LAYER + first),
        OURS + "residual.mlp_norm": same(LAYER + second),
    }


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. ALiBi is rounded to bfloat16, as the models were trained, and added
    before scores are divided by sqrt(D).
    """
    config.only("apply_residual_connection_post_layernorm", False, False)
    config.take("ff_factor", None)  # transformers reads ffn_hidden_size
    new = config.flag("new_decoder_architecture", False)
    many = not config.flag("multi_query", True)
    apart = not config.flag("parallel_attn", True)
    kv_heads = config.whole("num_kv_heads", config.heads)
    count = config.whole("num_ln_in_parallel_attn", 2 if new else 1)
    for wrong, rule, got in (
        (new and apart, "parallel_attn to be true with new_decoder_architecture", "false"),
        (
            not new and many and kv_heads != config.heads,
            f"num_kv_heads to be {config.heads} without multi_query and new_decoder_architecture",
            kv_heads,
        ),
        (
            not apart and count > 1 + new,
            f"num_ln_in_parallel_attn to be {'1 or 2 with' if new else '1 without'} "
            "new_decoder_architecture",
            count,
        ),
    ):
        if wrong:
            raise ValueError(f"falcon: expected {rule}, got {got}; correct config.json")
    rotation = (
        {"name": "alibi", "added": "before", "numerics": "bfloat16"}
        if config.flag("alibi", False)
        else config.rotation()
    )
    config.rotation_keys()  # take rotary keys, which have no effect with ALiBi
    residual = "pre" if apart else "parallel_norms" if count == 2 else "parallel"
    bias, hidden = config.flag("bias", False), config.whole("ffn_hidden_size", 4 * config.width)
    heads = kv_heads if new or many else 1
    kind = layer(
        attention(config, bias, heads),
        layer_norm(config, "layer_norm_epsilon"),
        hidden,
        config.activation("activation", "gelu"),
        bias,
        residual,
    )
    return decoder(config, *alike(kind, config.layers, [rotation]), tied=True)


FAMILY = Family(describe, WEIGHTS, base="transformer.", further_weights=norms)
