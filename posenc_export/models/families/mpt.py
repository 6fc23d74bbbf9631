"""MPT (MosaicML 2023, Introducing MPT-7B): ALiBi, norms without biases, optional clipping of
queries, keys and values.
"""

from posenc_export.models.families.shared.family import UNSUPPORTED, Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import alike, decoder
from posenc_export.models.families.shared.plain import attention, layer, layer_norm
from posenc_export.models.families.shared.rules import OURS, Table, same

LAYER = "transformer.blocks.{layer}."
WEIGHTS: Table = {
    "tokens.embedding": same("transformer.wte"),
    OURS + "residual.attention_norm": same(LAYER + "norm_1"),
    OURS + "attention.projection.qkv": same(LAYER + "attn.Wqkv"),
    OURS + "attention.projection.output": same(LAYER + "attn.out_proj"),
    OURS + "residual.mlp_norm": same(LAYER + "norm_2"),
    OURS + "mlp.up": same(LAYER + "ffn.up_proj"),
    OURS + "mlp.down": same(LAYER + "ffn.down_proj"),
    "norm": same("transformer.norm_f"),
    "head.linear": same("lm_head"),
}
# Switches of MosaicML's code that transformers does not have, with the values that match
# transformers' computation.
ONLY = {"expansion_ratio": 4, "logit_scale": None, "no_bias": True}
ONLY_IN_ATTENTION = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder.

    learned_pos_emb has no effect with ALiBi, embedding_fraction has none outside training, and
    norm_type only affects the precision of LayerNorm. alibi_bias_max is used as in MosaicML's code
    (16 in MPT-7B-StoryWriter); transformers 5 ignores it and uses 8.
    """
    config.flatten("attn_config")
    config.fixed(
        {**ONLY, **{f"attn_config.{key}": value for key, value in ONLY_IN_ATTENTION.items()}}
    )
    config.ignore(
        (
            "learned_pos_emb",
            "embedding_fraction",
            "attn_config.attn_impl",
            "attn_config.model_type",
            "attn_config.is_encoder_decoder",
        )
    )
    if (kind_of_norm := config.take("norm_type", "layernorm")) not in (
        "layernorm",
        "low_precision_layernorm",
    ):
        raise ValueError(
            "mpt: expected norm_type to be layernorm or low_precision_layernorm, got "
            f"{kind_of_norm!r}; {UNSUPPORTED}"
        )
    clip = config.number_or_none("attn_config.clip_qkv")
    scale = config.number_or_none("attn_config.softmax_scale")
    slopes = config.number("attn_config.alibi_bias_max", 8.0)
    encoding = {"name": "alibi", **({} if slopes == 8 else {"max_bias": slopes})}
    norm = {**layer_norm(config, "layer_norm_epsilon"), "bias": False}
    kind = layer(
        attention(config, bias=False, clip=clip, scale=scale),
        norm,
        4 * config.width,
        "gelu",
        bias=False,
    )
    return decoder(config, *alike(kind, config.layers, [encoding]), tied=True)


FAMILY = Family(describe, WEIGHTS, base="transformer.")
