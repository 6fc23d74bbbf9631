"""BLOOM (Scao et al. 2022, BLOOM: A 176B-Parameter Open-Access Multilingual Language Model,
3.2): ALiBi, a norm after the token embedding.
"""

import msgspec

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import alike, decoder
from posenc_export.models.families.shared.plain import attention, layer, layer_norm, megatron_layer
from posenc_export.models.families.shared.rules import Table, same

# Settings of Megatron, which transformers does not read.
MEGATRON = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
)
WEIGHTS: Table = {
    "tokens.embedding": same("transformer.word_embeddings"),
    "tokens.norm": same("transformer.word_embeddings_layernorm"),
    **megatron_layer("transformer.h.{layer}."),
    "norm": same("transformer.ln_f"),
    "head.linear": same("lm_head"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. The number of positions is seq_length or given, since ALiBi has no
    limit.
    """
    config.ignore(MEGATRON)
    slices = config.values.get("pretraining_tp", 1)
    # Transformers then leaves out the biases of two projections.
    if config.flag("slow_but_exact", False) and slices != 1:
        raise ValueError(
            "bloom: expected slow_but_exact to be false with pretraining_tp above 1, got "
            f"true and {slices!r}; set it to false"
        )
    config.only("apply_residual_connection_post_layernorm", False, False)
    hidden, norm = 4 * config.width, layer_norm(config, "layer_norm_epsilon")
    if config.whole("intermediate_size", hidden) != hidden:
        raise ValueError(
            f"bloom: expected n_inner to be null or {hidden}, four times the width, got "
            "another value; correct config.json"
        )
    kind = layer(attention(config, bias=True), norm, hidden, "gelu_tanh")
    described = decoder(config, *alike(kind, config.layers, [{"name": "alibi"}]), tied=True)
    return msgspec.structs.replace(
        described, tokens=msgspec.structs.replace(described.tokens, norm=norm)
    )


FAMILY = Family(describe, WEIGHTS, base="transformer.")
