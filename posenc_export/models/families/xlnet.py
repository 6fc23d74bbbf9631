"""XLNet (Yang et al. 2019): Transformer-XL's sinusoids, post-norm. Only the content stream."""

from typing import Any, Mapping

from posenc_export.models.config import Named, StackConfig, TokensConfig
from posenc_export.models.families.shared import plain, rules
from posenc_export.models.families.shared.encoders import UNUSED, encoder_only
from posenc_export.models.families.shared.family import Family, Settings, layer_of, stack

LAYER = "transformer.layer.{layer}."
HEADS = LAYER + "rel_attn."
WEIGHTS: rules.Table = {
    "tokens.embedding": rules.same("transformer.word_embedding"),
    rules.QKV: rules.joined_heads(HEADS + "q", HEADS + "k", HEADS + "v"),
    rules.ENCODING + ".u": rules.whole(HEADS + "r_w_bias"),
    rules.ENCODING + ".v": rules.whole(HEADS + "r_r_bias"),
    rules.ENCODING + ".s": rules.whole(HEADS + "r_s_bias"),
    rules.ENCODING + ".segment": rules.whole(HEADS + "seg_embed"),
    rules.ENCODING + ".weight": rules.permuted(HEADS + "r", (1, 2, 0)),
    rules.OURS + "attention.projection.output": rules.flat_heads(HEADS + "o"),
    rules.OURS + "residual.attention_norm": rules.same(HEADS + "layer_norm"),
    rules.OURS + "mlp.up": rules.same(LAYER + "ff.layer_1"),
    rules.OURS + "mlp.down": rules.same(LAYER + "ff.layer_2"),
    rules.OURS + "residual.mlp_norm": rules.same(LAYER + "ff.layer_norm"),
}
SEGMENTS = 4  # token types of XLNet's tokenizer: first text, second text, final token, padding
# Tensors of pretraining and of task heads.
NOT_READ = (r"mask_emb$", r"^(lm_loss|logits_proj|start_logits|end_logits|answer_class)\.")
# Keys of memory and of task heads.
UNREAD = "end_n_top mem_len reuse_len start_n_top untie_r use_mems_eval use_mems_train".split()
FIXED = {"attn_type": "bi", "bi_data": False, "same_length": False}


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Token types act on scores, so the table of segments is zero."""
    config.fixed({**FIXED, "d_head": config.width // config.heads})
    config.ignore(UNREAD)
    clamp = config.integer("clamp_len", -1)
    encoder_only(config)
    encoding: Named = {"name": "transformer_xl", "segments": "pairs"}
    encoding |= {"clamp": clamp} if clamp > 0 else {}
    both = {"name": "both"}
    attention = plain.attention(config, bias=False, encodings=(encoding,), sees=both)
    mlp = plain.mlp(config, "ff_activation")
    kind = layer_of(attention, mlp, plain.layer_norm(config), "post")
    tokens = TokensConfig(vocabulary=config.whole("vocab_size"), segments=SEGMENTS)
    return stack(config, {"layer": kind}, ("layer",) * config.layers, tokens)


def no_segments(description: StackConfig, config: Mapping[str, Any]) -> rules.Table:
    return {"tokens.segments": rules.no_table(SEGMENTS, description.width)}


UNREAD_TENSORS = (*UNUSED, *NOT_READ)
FAMILY = Family(describe, WEIGHTS, "transformer.", (), UNREAD_TENSORS, no_segments)
