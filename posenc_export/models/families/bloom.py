"""BLOOM (Scao et al. 2022, 3.2): ALiBi, a norm after the token embedding."""

import msgspec

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
from posenc_export.models.families.shared.rules import Table, same

# Settings of Megatron, which transformers does not read.
MEGATRON = (
    "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi "
    "skip_bias_add skip_bias_add_qkv"
).split()
WEIGHTS: Table = {
    "tokens.embedding": same("transformer.word_embeddings"),
    "tokens.norm": same("transformer.word_embeddings_layernorm"),
    **plain.megatron_layer("transformer.h.{layer}."),
    "norm": same("transformer.ln_f"),
    "head.linear": same("lm_head"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Its range is seq_length or given: ALiBi has no limit."""
    config.ignore(MEGATRON)
    slices = config.values.get("pretraining_tp", 1)
    # Transformers then leaves out the biases of two projections.
    if config.flag("slow_but_exact", False) and slices != 1:
        rule = "slow_but_exact to be false with pretraining_tp above 1"
        raise config.refusal(rule, slices, "set it to false")
    config.fixed({"apply_residual_connection_post_layernorm": False})
    hidden, norm = 4 * config.width, plain.layer_norm(config, "layer_norm_epsilon")
    if (size := config.whole("intermediate_size", hidden)) != hidden:
        raise config.refusal(f"n_inner to be null or {hidden}, four times the width", size)
    mlp = {"name": "plain", "hidden": hidden, "activation": "gelu_tanh", "bias": True}
    kind = layer_of(plain.attention(config, bias=True), mlp, norm)
    described = gated.uniform(config, kind, [{"name": "alibi", "distances": "tokens"}], tied=True)
    tokens = msgspec.structs.replace(described.tokens, norm=norm)
    return msgspec.structs.replace(described, tokens=tokens)


FAMILY = Family(describe, WEIGHTS, base="transformer.")
