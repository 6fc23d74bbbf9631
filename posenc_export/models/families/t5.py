"""T5 (Raffel et al. 2020) and mT5 (Xue et al. 2021): pre-norm, no biases, buckets of distances."""

from typing import Any, Dict, Mapping, Tuple

from posenc_export.models.families.shared import family
from posenc_export.models.families.shared.encoders import reading_layers
from posenc_export.models.families.shared.rules import (
    OURS,
    Rule,
    Table,
    joined,
    keys_and_values,
    same,
)

WEIGHTS: Table = {"tokens.embedding": same("shared"), "norm": same("encoder.final_layer_norm")}
# Patterns of tensors in the decoder: the cross-attention projections of keys and values, which
# belong to our encoder, and all others.
KEYS_AND_VALUES = r"block\.\d+\.layer\.1\.EncDecAttention\.[kv]\."
DECODER = rf"^decoder\.(?!{KEYS_AND_VALUES})"
# Keys that do not affect outputs.
UNREAD = (
    "classifier_dropout decoder_start_token_id dropout_rate initializer_factor "
    "is_encoder_decoder output_past"
).split()


def describe(config: family.Settings) -> family.StackConfig:
    """Describe the encoder up to hidden states."""
    _decoder_size(config)
    return _encoder(config, _layer(config, "both"))


def describe_encoder(config: family.Settings) -> family.StackConfig:
    """Describe the encoder up to the keys and values of the decoder's cross-attention."""
    layers, _ = _decoder_size(config)
    kind = _layer(config, "both")
    size = 2 * layers * kind.attention.heads * kind.attention.head_size
    return _encoder(config, kind, key_values=family.KeyValuesConfig(size=size))


def describe_decoder(config: family.Settings) -> family.StackConfig:
    """Describe the decoder."""
    layers, head = _decoder_size(config)
    kind = _layer(config, "causal")
    kinds, order = reading_layers(kind, layers, {"name": "queries"}, scale=1.0)
    tokens = family.TokensConfig(vocabulary=config.whole("vocab_size"))
    return family.stack(config, kinds, order, tokens, norm=kind.norms[0], head=head)


def _decoder_size(config: family.Settings) -> Tuple[int, family.HeadConfig]:
    """Return the number of decoder layers, and the head, which T5 scales by 1/sqrt(E)."""
    config.ignore(("task_specific_params", "tokenizer_class"))
    tied = config.flag("tie_word_embeddings", True)
    scaled = config.flag("scale_decoder_outputs", tied)
    layers = config.whole("num_decoder_layers", config.layers)
    scale = config.width**-0.5 if scaled and config.family == "t5" else 1.0
    return layers, family.HeadConfig(tied=tied, scale=scale)


def _layer(config: family.Settings, sees: str) -> family.LayerConfig:
    """Describe a layer. Scores are not divided by sqrt(D); buckets cover all distances."""
    config.ignore(UNREAD)
    config.fixed({"is_decoder": False})
    norm = {"name": "rms", "epsilon": config.number("layer_norm_epsilon")}
    buckets = {
        "name": "t5",
        "buckets": config.whole("relative_attention_num_buckets"),
        "max_distance": config.whole("relative_attention_max_distance", 128),
    }
    attention = family.AttentionConfig(
        heads=config.heads,
        kv_heads=config.heads,
        head_size=config.whole("d_kv"),
        encodings=(buckets,),
        sees={"name": sees},
    )
    return family.layer_of(attention, _mlp(config), norm)


def _mlp(config: family.Settings) -> family.Named:
    gated, _, named = str(config.take("feed_forward_proj", "relu")).rpartition("-")
    activation = "gelu_new" if (gated, named) == ("gated", "gelu") else named
    if gated not in ("", "gated") or activation not in family.ACTIVATIONS:
        known = ", ".join(family.ACTIVATIONS)
        rule = f"feed_forward_proj to be one of {known}, or gated- and one of these"
        raise config.error(rule, f"{gated}-{named}", family.UNSUPPORTED)
    # Written beside feed_forward_proj, and preferred by transformers.
    config.fixed({"dense_act_fn": activation, "is_gated_act": gated == "gated"})
    name, hidden = "gated" if gated else "plain", config.whole("intermediate_size")
    return {
        "name": name,
        "hidden": hidden,
        "activation": family.ACTIVATIONS[activation],
        "bias": False,
    }


def _encoder(
    config: family.Settings, kind: family.LayerConfig, **output: Any
) -> family.StackConfig:
    tokens = family.TokensConfig(vocabulary=config.whole("vocab_size"))
    order, norm = ("layer",) * config.layers, kind.norms[0]
    return family.stack(config, {"layer": kind}, order, tokens, norm=norm, **output)


def _layer_rules(
    description: family.StackConfig, own: str, reading: str, block: str, mlp: int
) -> Dict[str, Rule]:
    """Return the rules of a layer. own, reading: prefixes of our layers with self-attention and
    with the MLP; mlp: index of the MLP among the sublayers of `block`.
    """
    read, feed = block + "layer.0.SelfAttention.", block + f"layer.{mlp}.DenseReluDense."
    gated = description.kinds[-1].mlp["name"] == "gated"
    return {
        own + "residual.attention_norm": same(block + "layer.0.layer_norm"),
        own + "attention.projection.qkv": joined(read + "q", read + "k", read + "v"),
        own + "attention.projection.output": same(read + "o"),
        own + "attention.encoding.table": same(
            block.partition(".")[0] + ".block.0.layer.0.SelfAttention.relative_attention_bias"
        ),
        reading + "residual.mlp_norm": same(block + f"layer.{mlp}.layer_norm"),
        reading + "mlp.gate": same(feed + "wi_0"),
        reading + "mlp.up": same(feed + ("wi_1" if gated else "wi")),
        reading + "mlp.down": same(feed + "wo"),
    }


def names(description: family.StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules of the encoder's layers."""
    return _layer_rules(description, OURS, OURS, "encoder.block.{layer}.", 1)


def names_of_encoder(description: family.StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules of `names`, and of keys and values of the decoder's cross-attention."""
    module = "decoder.block.{row}.layer.1.EncDecAttention."
    layers = int(config.get("num_decoder_layers") or len(description.order))
    of_keys = keys_and_values(module + "k", module + "v", layers)
    return {**names(description, config), "head.linear": of_keys}


def names_of_decoder(description: family.StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules. Layers 2i and 2i + 1 of our model are layer i of the checkpoint."""
    table: Dict[str, Rule] = {
        "tokens.embedding": same("shared"),
        "norm": same("decoder.final_layer_norm"),
        "head.linear": same("lm_head"),
    }
    for row in range(len(description.order) // 2):
        block = f"decoder.block.{row}."
        own = f"layers.{2 * row}."
        reading = f"layers.{2 * row + 1}."
        table |= _layer_rules(description, own, reading, block, 2)
        table[reading + "residual.attention_norm"] = same(block + "layer.1.layer_norm")
        table[reading + "attention.projection.query"] = same(block + "layer.1.EncDecAttention.q")
        table[reading + "attention.projection.output"] = same(block + "layer.1.EncDecAttention.o")
    return table


UNUSED = (r"^lm_head\.", r"^encoder\.embed_tokens\.")
OF_ENCODER = (r"^encoder\.", r"^decoder\.embed_tokens\.", KEYS_AND_VALUES)
PARTS = {
    "encoder": family.Family(
        describe_encoder, WEIGHTS, "", (), (*UNUSED, DECODER), names_of_encoder
    ),
    "decoder": family.Family(describe_decoder, {}, "", (), OF_ENCODER, names_of_decoder),
}
UNUSED_BY_WHOLE = (r"^decoder\.", *UNUSED, r"layer\.1\.EncDecAttention\.")
FAMILY = family.Family(describe, WEIGHTS, "", (), UNUSED_BY_WHOLE, names, parts=PARTS)
