"""What BERT and the encoders after it have in common: a norm over tokens, positions and segments, layers with norms behind (Devlin et al. 2018, BERT, 3)."""

from typing import Any, Callable, Mapping, Optional, Sequence

from posenc_export.models.config import AttentionConfig, LayerConfig, Named, StackConfig, TokensConfig
from posenc_export.models.families.encoder_rules import PlusRow
from posenc_export.models.families.rules import Joined, Same, Table
from posenc_export.models.families.settings import Settings

OURS = "layers.{layer}."
QKV = OURS + "attention.projection.qkv"
ENCODING = OURS + "attention.encoding"
# Keys that say nothing about hidden states: dropout, initialisation, heads of other tasks.
UNREAD = """attention_probs_dropout_prob chunk_size_feed_forward classifier_activation classifier_bias classifier_dropout classifier_pooling cls_token_id
    decoder_bias deterministic_flash_attn directionality dropout embedding_dropout finetuning_task gradient_checkpointing hidden_dropout_prob
    initializer_cutoff_factor language legacy mlp_dropout name output_past padding_idx pooler_dropout pooler_fc_size pooler_hidden_act pooler_hidden_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type qa_dropout reference_compile repad_logits_with_grad sep_token_id
    seq_classif_dropout sparse_pred_ignore_index sparse_prediction summary_activation summary_first_dropout summary_last_dropout summary_type
    summary_use_proj task_specific_params tie_word_embeddings tokenizer_class""".split()
# Keys of a decoder, and of positions and heads that transformers has no more: the one value of each that is an encoder.
ENCODER = {"is_decoder": False, "add_cross_attention": False, "is_encoder_decoder": False, "position_embedding_type": "absolute", "pruned_heads": {}}
# Heads of other tasks, and buffers of older versions.
UNUSED = (
    r"^(\w+\.)?pooler\.",
    r"^(classifier|cls|discriminator_predictions|generator_lm_head|generator_predictions|lm_head|lm_predictions|mask_predictions|pre_classifier)\.",
    r"^(qa_outputs|sequence_summary|vocab_layer_norm|vocab_projector|vocab_transform)\.",
    r"embeddings\.position_ids$",
)


def attention(config: Settings, encodings: Sequence[Named] = (), bias: bool = True, sees: Optional[Named] = None) -> AttentionConfig:
    """As many key heads as query heads; all four projections have biases, or none.

    Args:
        sees: all keys where None.
    """
    return AttentionConfig(
        heads=config.heads,
        kv_heads=config.heads,
        head_size=config.width // config.heads,
        encodings=tuple(encodings),
        sees=sees or {"name": "both"},
        projection={"name": "grouped", "bias": bias, "output_bias": bias},
    )


def post_norm(config: Settings, on_tokens: Sequence[Named], in_layers: Sequence[Named], max_positions: int, segments: int, **keys: Any) -> StackConfig:
    """BERT's shape.

    Args:
        on_tokens, in_layers: encodings.
        segments: number of token types; a single one is folded into the token table (`one_segment`).
        keys: activation, epsilon where config.json names them otherwise or not at all.
    """
    norm = {"name": "layer", "epsilon": keys["epsilon"] if "epsilon" in keys else config.number("layer_norm_eps")}
    mlp = {"name": "plain", "hidden": config.whole("intermediate_size"), "activation": config.activation(keys.get("activation", "hidden_act")), "bias": True}
    layer = LayerConfig(residual={"name": "post"}, norms=(norm, norm), attention=attention(config, in_layers), mlp=mlp)
    tokens = TokensConfig(vocabulary=config.whole("vocab_size"), encodings=tuple(on_tokens), segments=0 if segments == 1 else segments, norm=norm)
    encoder_only(config)
    return StackConfig(width=config.width, max_positions=max_positions, tokens=tokens, layers={"layer": layer}, order=("layer",) * config.layers)


def encoder_only(config: Settings) -> None:
    """Take keys that say nothing about hidden states, and refuse decoders."""
    for key in UNREAD:
        config.take(key, None)
    for key, value in ENCODER.items():
        config.only(key, value, value)


def table_rows(config: Settings, unused: int = 0) -> int:
    """Range of positions of a model with a table of them.

    Args:
        unused: rows at the front that no position reads.

    Raises:
        ValueError: another range asked for, a table without rows.
    """
    rows = config.trained_positions - unused
    if rows < 1:
        raise ValueError(f"{config.family}: max_position_embeddings is above the {unused} rows of padding, got {config.trained_positions}; correct config.json")
    if config.max_positions not in (rows, config.trained_positions):
        raise ValueError(f"{config.family}: max_positions is the {rows} rows of its position table, got {config.max_positions}; leave it out and call grown(model, N)")
    return rows


def segments(config: Settings) -> int:
    """Number of token types, 0 or more.

    Raises:
        ValueError: no such number.
    """
    value = config.take("type_vocab_size")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{config.family}: type_vocab_size is a whole number of 0 or more, got {value!r}; correct config.json")
    return value


def as_wide_as_model(config: Settings, default: Optional[int] = None) -> None:
    """Refuse token tables of another width than the model: what widens them stands behind their norm.

    Args:
        default: of the family, where config.json has no embedding_size; the width of the model where None.
    """
    config.only("embedding_size", config.width, config.width if default is None else default)


def weights(base: str) -> Table:
    """BERT's names.

    Args:
        base: what they start with.
    """
    layer, tokens = base + "encoder.layer.{layer}.", base + "embeddings."
    read = layer + "attention.self."
    return {
        "tokens.embedding": Same(tokens + "word_embeddings"),
        "token_encoding.table": Same(tokens + "position_embeddings"),
        "tokens.segments": Same(tokens + "token_type_embeddings"),
        "tokens.norm": Same(tokens + "LayerNorm"),
        QKV: Joined(read + "query", read + "key", read + "value"),
        OURS + "attention.projection.output": Same(layer + "attention.output.dense"),
        OURS + "residual.attention_norm": Same(layer + "attention.output.LayerNorm"),
        OURS + "mlp.up": Same(layer + "intermediate.dense"),
        OURS + "mlp.down": Same(layer + "output.dense"),
        OURS + "residual.mlp_norm": Same(layer + "output.LayerNorm"),
    }


def one_segment(base: str) -> Callable[[StackConfig, Mapping[str, Any]], Table]:
    """The token table of models with a single token type: its row is part of every token.

    Args:
        base: what names start with.
    """
    tokens = base + "embeddings."

    def lines(description: StackConfig, config: Mapping[str, Any]) -> Table:
        return {"tokens.embedding": PlusRow(tokens + "word_embeddings", tokens + "token_type_embeddings")} if config.get("type_vocab_size") == 1 else {}

    return lines
