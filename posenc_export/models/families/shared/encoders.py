"""Common code of BERT-like encoders: embeddings of tokens, positions and segments with a norm,
and post-norm layers (Devlin et al. 2018, BERT, 3).
"""

from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from posenc_export.models.config import (
    AttentionConfig,
    LayerConfig,
    Named,
    StackConfig,
    TokensConfig,
)
from posenc_export.models.families.shared.plain import attention, layer
from posenc_export.models.families.shared.rules import OURS, QKV, Table, joined, plus_row, same
from posenc_export.models.families.shared.settings import Settings

# Keys that do not affect hidden states: dropout, initialisation, heads of other tasks.
UNREAD = """attention_probs_dropout_prob chunk_size_feed_forward classifier_activation classifier_bias classifier_dropout classifier_pooling cls_dropout cls_token_id
    decoder_bias deterministic_flash_attn directionality dropout embedding_dropout finetuning_task gradient_checkpointing hidden_dropout_prob
    initializer_cutoff_factor language legacy mlp_dropout name output_past padding_idx pooler_dropout pooler_fc_size pooler_hidden_act pooler_hidden_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type qa_dropout reference_compile repad_logits_with_grad sep_token_id
    seq_classif_dropout sparse_pred_ignore_index sparse_prediction summary_activation summary_first_dropout summary_last_dropout summary_type
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
UNUSED = (
    r"^(\w+\.)?pooler\.",
    r"^(classifier|cls|discriminator_predictions|generator_lm_head|generator_predictions|lm_head|lm_predictions|mask_predictions|pre_classifier)\.",
    r"^(qa_outputs|sequence_summary|vocab_layer_norm|vocab_projector|vocab_transform)\.",
    r"embeddings\.position_ids$",
)


def post_norm(
    config: Settings,
    on_tokens: Sequence[Named],
    in_layers: Sequence[Named],
    max_positions: int,
    segments: int,
    **keys: Any,
) -> StackConfig:
    """Describe an encoder with the architecture of BERT.

    Args:
        on_tokens, in_layers: encodings of tokens, and in layers.
        max_positions: number of positions.
        segments: number of token types. A single type is added to the token table (`one_segment`).
        keys: `activation`, the key of the activation if it is not hidden_act; `epsilon`, the
            epsilon of norms if config.json does not give it.
    """
    norm = {
        "name": "layer",
        "epsilon": keys["epsilon"] if "epsilon" in keys else config.number("layer_norm_eps"),
    }
    hidden = config.whole("intermediate_size")
    activation = config.activation(keys.get("activation", "hidden_act"))
    kind = layer(
        attention(config, bias=True, encodings=tuple(in_layers), sees={"name": "both"}),
        norm,
        hidden,
        activation,
        residual="post",
    )
    tokens = TokensConfig(
        vocabulary=config.whole("vocab_size"),
        encodings=tuple(on_tokens),
        segments=0 if segments == 1 else segments,
        norm=norm,
    )
    encoder_only(config)
    return StackConfig(
        width=config.width,
        max_positions=max_positions,
        tokens=tokens,
        layers={"layer": kind},
        order=("layer",) * config.layers,
    )


def reading_layers(
    kind: LayerConfig, layers: int, projection: Named, scale: Optional[float] = None
) -> Tuple[Dict[str, LayerConfig], Tuple[str, ...]]:
    """Return kinds and order of the layers of a decoder that reads an encoder. Each of its layers
    becomes two: self-attention, then cross-attention with the MLP.

    Args:
        kind: self-attention with the norms and the MLP of a layer.
        layers: number of layers of the checkpoint.
        projection, scale: fields of the cross-attention.
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
    kinds = {
        "own": LayerConfig(
            residual={"name": "alone"}, norms=(norm,), attention=own, mlp={"name": "none"}
        ),
        "encoder": LayerConfig(
            residual={"name": "pre"}, norms=(norm, norm), attention=cross, mlp=kind.mlp
        ),
    }
    return kinds, ("own", "encoder") * layers


def encoder_only(config: Settings) -> None:
    """Take keys that do not affect hidden states, and refuse decoders."""
    config.ignore(UNREAD)
    config.fixed(ENCODER)


def weights(base: str) -> Table:
    """Return the weight table of BERT.

    Args:
        base: prefix of tensor names.
    """
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


def one_segment(base: str) -> Callable[[StackConfig, Mapping[str, Any]], Table]:
    """Return a function that adds the row of a single token type to the token table, for
    `Family.further_weights`. base: prefix of tensor names.
    """
    rule = plus_row(base + "embeddings.word_embeddings", base + "embeddings.token_type_embeddings")
    return lambda description, config: (
        {"tokens.embedding": rule} if config.get("type_vocab_size") == 1 else {}
    )
