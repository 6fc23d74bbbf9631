"""BERT-like encoders: positions, segments and a norm, post-norm layers (Devlin et al. 2018, 3)."""

from types import MappingProxyType
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from posenc_export.models.config import AttentionConfig, LayerConfig, Named, TokensConfig
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
from posenc_export.models.families.shared.plain import attention, layer_norm, mlp, table_rows
from posenc_export.models.families.shared.rules import OURS, QKV, Table, joined, plus_row, same

Further = Callable[[StackConfig, Mapping[str, Any]], Table]

# Keys that do not affect hidden states: dropout, initialisation, heads of other tasks.
UNREAD = """attention_probs_dropout_prob chunk_size_feed_forward classifier_dropout cls_dropout
    directionality dropout finetuning_task gradient_checkpointing hidden_dropout_prob language
    legacy name output_past padding_idx pooler_dropout pooler_hidden_act pooler_hidden_size
    sep_token_id summary_activation summary_first_dropout summary_last_dropout summary_type
    summary_use_proj task_specific_params tie_word_embeddings tokenizer_class""".split()
# Keys of decoders, and of positions and heads that transformers no longer supports, with the only
# value allowed in an encoder.
ENCODER = {
    "is_decoder": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "position_embedding_type": "absolute",
    "pruned_heads": {},
}
# Tensors to ignore: heads of other tasks, buffers of older versions.
HEADS = "classifier cls lm_head lm_predictions mask_predictions qa_outputs sequence_summary".split()
UNUSED = (r"^(\w+\.)?pooler\.", rf"^({'|'.join(HEADS)})\.", r"embeddings\.position_ids$")


def post_norm(
    config: Settings,
    unused: Optional[int],
    in_layers: Sequence[Named] = (),
    segments: Optional[int] = None,
    beside: Sequence[Named] = (),
) -> StackConfig:
    """Describe an encoder with the architecture of BERT.

    Args:
        unused: number of rows at the beginning of the table of learned positions that no position
            uses; None without learned positions.
        in_layers: encodings in layers.
        beside: further encodings of tokens, after learned positions.
        segments: number of token types; None for type_vocab_size. A single type is added to the
            token table (`encoder`).
    """
    max_positions = config.max_positions if unused is None else table_rows(config, unused)
    offset = {"offset": unused} if unused else {}
    learned = () if unused is None else ({"name": "learned", **offset},)
    if segments is None:
        segments = config.integer("type_vocab_size", least=0)
    norm = layer_norm(config)
    read = attention(config, bias=True, encodings=tuple(in_layers), sees={"name": "both"})
    tokens = TokensConfig(
        vocabulary=config.whole("vocab_size"),
        encodings=(*learned, *beside),
        segments=0 if segments == 1 else segments,
        norm=norm,
    )
    encoder_only(config)
    kinds = {"layer": layer_of(read, mlp(config, "hidden_act"), norm, "post")}
    return StackConfig(
        width=config.width,
        max_positions=max_positions,
        tokens=tokens,
        layers=kinds,
        order=("layer",) * config.layers,
    )


def reading_layers(
    kind: LayerConfig, layers: int, projection: Named, scale: Optional[float] = None
) -> Tuple[Dict[str, LayerConfig], Tuple[str, ...]]:
    """Return kinds and order of the layers of a decoder that reads an encoder. Each of its layers
    becomes two: the self-attention of `kind`, then cross-attention with its MLP.
    """
    own, norm = kind.attention, kind.norms[0]
    cross = AttentionConfig(
        heads=own.heads,
        kv_heads=own.heads,
        head_size=own.head_size,
        sees={"name": "encoder"},
        projection=projection,
        scale=scale,
    )
    reading = layer_of(cross, kind.mlp, norm)
    kinds = {"own": layer_of(own, {"name": "none"}, norm, "alone"), "encoder": reading}
    return kinds, ("own", "encoder") * layers


def encoder_only(config: Settings) -> None:
    """Take keys that do not affect hidden states, and refuse decoders."""
    config.ignore(UNREAD)
    config.fixed(ENCODER)


def weights(base: str) -> Table:
    """Return the weight table of BERT, with a prefix of tensor names."""
    layer, tokens = base + "encoder.layer.{layer}.", base + "embeddings."
    read = layer + "attention.self."
    return {
        "tokens.embedding": same(tokens + "word_embeddings"),
        "token_encoding.table": same(tokens + "position_embeddings"),
        "tokens.segments": same(tokens + "token_type_embeddings"),
        "tokens.norm": same(tokens + "LayerNorm"),
        QKV: joined(read + "query", read + "key", read + "value"),
        OURS + "attention.projection.output": same(layer + "attention.output.dense"),
        OURS + "residual.attention_norm": same(layer + "attention.output.LayerNorm"),
        OURS + "mlp.up": same(layer + "intermediate.dense"),
        OURS + "mlp.down": same(layer + "output.dense"),
        OURS + "residual.mlp_norm": same(layer + "output.LayerNorm"),
    }


def encoder(
    describe: Callable[[Settings], StackConfig],
    base: str,
    table: Table = MappingProxyType({}),
    unused: Tuple[str, ...] = (),
    further: Further = lambda *_: {},
) -> Family:
    """Return a family with the architecture of BERT, in which the row of a single token type is
    added to the token table. table: further rules and those that differ; others as for Family.
    """
    tokens = base + "embeddings.word_embeddings"
    one_type = {"tokens.embedding": plus_row(tokens, base + "embeddings.token_type_embeddings")}

    def further_weights(description: StackConfig, config: Mapping[str, Any]) -> Table:
        single = one_type if config.get("type_vocab_size") == 1 else {}
        return {**single, **further(description, config)}

    rules = {**weights(base), **table}
    return Family(describe, rules, base, (), (*UNUSED, *unused), further_weights)
