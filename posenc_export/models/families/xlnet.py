"""XLNet (Yang et al. 2019): Transformer-XL's sinusoids, post-norm. Only the content stream."""

from typing import Any, Mapping

from posenc_export.models.config import Named, StackConfig, TokensConfig
from posenc_export.models.families.shared import plain
from posenc_export.models.families.shared.encoders import UNUSED, encoder_only
from posenc_export.models.families.shared.family import Family, Settings, layer_of, stack
from posenc_export.models.families.shared.rules import (
    ENCODING,
    OURS,
    QKV,
    Table,
    flat_heads,
    joined_heads,
    no_table,
    permuted,
    same,
    whole,
)

LAYER = "transformer.layer.{layer}."
HEADS = LAYER + "rel_attn."
WEIGHTS: Table = {
    "tokens.embedding": same("transformer.word_embedding"),
    QKV: joined_heads(HEADS + "q", HEADS + "k", HEADS + "v"),
    ENCODING + ".u": whole(HEADS + "r_w_bias"),
    ENCODING + ".v": whole(HEADS + "r_r_bias"),
    ENCODING + ".s": whole(HEADS + "r_s_bias"),
    ENCODING + ".segment": whole(HEADS + "seg_embed"),
    ENCODING + ".weight": permuted(HEADS + "r", (1, 2, 0)),
    OURS + "attention.projection.output": flat_heads(HEADS + "o"),
    OURS + "residual.attention_norm": same(HEADS + "layer_norm"),
    OURS + "mlp.up": same(LAYER + "ff.layer_1"),
    OURS + "mlp.down": same(LAYER + "ff.layer_2"),
    OURS + "residual.mlp_norm": same(LAYER + "ff.layer_norm"),
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


def no_segments(description: StackConfig, config: Mapping[str, Any]) -> Table:
    return {"tokens.segments": no_table(SEGMENTS, description.width)}


UNREAD_TENSORS = (*UNUSED, *NOT_READ)
FAMILY = Family(describe, WEIGHTS, "transformer.", (), UNREAD_TENSORS, no_segments)
