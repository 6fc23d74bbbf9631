"""T5 and mT5, their encoder (Raffel et al. 2020, Exploring the Limits of Transfer Learning; Xue et al. 2021, mT5): norms in front, no biases, buckets of distances."""

from typing import Any, Mapping

from posenc_export.models.config import AttentionConfig, LayerConfig, StackConfig, TokensConfig
from posenc_export.models.families import Family
from posenc_export.models.families.encoders import ENCODING, OURS, QKV
from posenc_export.models.families.rules import Joined, Same, Table
from posenc_export.models.families.settings import ACTIVATIONS, Settings

LAYER = "encoder.block.{layer}."
READ = LAYER + "layer.0.SelfAttention."
WEIGHTS: Table = {
    "tokens.embedding": Same("shared"),
    OURS + "residual.attention_norm": Same(LAYER + "layer.0.layer_norm"),
    QKV: Joined(READ + "q", READ + "k", READ + "v"),
    OURS + "attention.projection.output": Same(READ + "o"),
    ENCODING + ".table": Same("encoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
    OURS + "residual.mlp_norm": Same(LAYER + "layer.1.layer_norm"),
    OURS + "mlp.down": Same(LAYER + "layer.1.DenseReluDense.wo"),
    "norm": Same("encoder.final_layer_norm"),
}
# Of the decoder, of its head, and of training.
UNREAD = """classifier_dropout decoder_start_token_id dense_act_fn dropout_rate initializer_factor is_encoder_decoder is_gated_act num_decoder_layers output_past
    scale_decoder_outputs task_specific_params tie_word_embeddings tokenizer_class""".split()


def describe(config: Settings) -> StackConfig:
    """To hidden states: the decoder is left out. Scores are not divided by sqrt(D). Distances are bounded by buckets alone, so that any range may be given."""
    for key in UNREAD:
        config.take(key, None)
    config.only("is_decoder", False, False)
    gated, _, named = str(config.take("feed_forward_proj", "relu")).rpartition("-")
    activation = "gelu_new" if (gated, named) == ("gated", "gelu") else named
    if gated not in ("", "gated") or activation not in ACTIVATIONS:
        rule = f"one of {', '.join(ACTIVATIONS)}, or gated- and one of these"
        raise ValueError(f"{config.family}: feed_forward_proj is {rule}, got {gated}-{named}; nothing else of it can be exported yet")
    norm = {"name": "rms", "epsilon": config.number("layer_norm_epsilon")}
    mlp = {"name": "gated" if gated else "plain", "hidden": config.whole("intermediate_size"), "activation": ACTIVATIONS[activation], "bias": False}
    buckets = {
        "name": "t5",
        "buckets": config.whole("relative_attention_num_buckets"),
        "max_distance": config.whole("relative_attention_max_distance", 128),
    }
    attention = AttentionConfig(heads=config.heads, kv_heads=config.heads, head_size=config.whole("d_kv"), encodings=(buckets,), sees={"name": "both"})
    return StackConfig(
        width=config.width,
        max_positions=config.max_positions,
        tokens=TokensConfig(vocabulary=config.whole("vocab_size")),
        layers={"layer": LayerConfig(residual={"name": "pre"}, norms=(norm, norm), attention=attention, mlp=mlp)},
        order=("layer",) * config.layers,
        norm=norm,
    )


def names(description: StackConfig, config: Mapping[str, Any]) -> Table:
    """The first layer of an MLP, which is two where it is gated."""
    dense = LAYER + "layer.1.DenseReluDense."
    if description.kinds[0].mlp["name"] == "gated":
        return {OURS + "mlp.gate": Same(dense + "wi_0"), OURS + "mlp.up": Same(dense + "wi_1")}
    return {OURS + "mlp.up": Same(dense + "wi")}


FAMILY = Family(describe, WEIGHTS, base="", unused=(r"^decoder\.", r"^lm_head\.", r"^encoder\.embed_tokens\.", r"layer\.1\.EncDecAttention\."), further=names)
