"""MPT (MosaicML 2023): ALiBi, norms without biases, clipping of queries, keys and values."""

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
from posenc_export.models.families.shared.rules import OURS, QKV, Table, same

LAYER = "transformer.blocks.{layer}."
WEIGHTS: Table = {
    "tokens.embedding": same("transformer.wte"),
    OURS + "residual.attention_norm": same(LAYER + "norm_1"),
    QKV: same(LAYER + "attn.Wqkv"),
    OURS + "attention.projection.output": same(LAYER + "attn.out_proj"),
    OURS + "residual.mlp_norm": same(LAYER + "norm_2"),
    OURS + "mlp.up": same(LAYER + "ffn.up_proj"),
    OURS + "mlp.down": same(LAYER + "ffn.down_proj"),
    "norm": same("transformer.norm_f"),
    "head.linear": same("lm_head"),
}
# Switches of MosaicML's code that transformers does not have, with the values that match
# transformers' computation.
FIXED = {
    "expansion_ratio": 4,
    "logit_scale": None,
    "no_bias": True,
    "attn_config.alibi": True,
    "attn_config.attn_type": "multihead_attention",
    "attn_config.attn_uses_sequence_id": False,
    "attn_config.prefix_lm": False,
    "attn_config.qk_ln": False,
}
# Without effect with ALiBi, or outside training.
UNREAD = (
    "learned_pos_emb embedding_fraction attn_config.attn_impl attn_config.model_type "
    "attn_config.is_encoder_decoder"
).split()


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. norm_type only affects the precision of LayerNorm. alibi_bias_max is
    used as in MosaicML's code (16 in MPT-7B-StoryWriter); transformers 5 ignores it and uses 8.
    """
    config.flatten("attn_config")
    config.fixed(FIXED)
    config.ignore(UNREAD)
    config.choice("norm_type", ("layernorm", "low_precision_layernorm"))
    clip = config.number_or_none("attn_config.clip_qkv")
    scale = config.number_or_none("attn_config.softmax_scale")
    slopes = config.number("attn_config.alibi_bias_max", 8.0)
    encoding = {"name": "alibi", **({} if slopes == 8 else {"max_bias": slopes})}
    attention = plain.attention(config, bias=False, clip=clip, scale=scale)
    mlp = {"name": "plain", "hidden": 4 * config.width, "activation": "gelu", "bias": False}
    norm = {**plain.layer_norm(config, "layer_norm_epsilon"), "bias": False}
    return gated.uniform(config, layer_of(attention, mlp, norm), [encoding], tied=True)


FAMILY = Family(describe, WEIGHTS, base="transformer.")
