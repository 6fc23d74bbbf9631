"""Whisper (Radford et al. 2022): spectrogram to text; pre-norm layers, learned positions."""

from typing import Any, Callable, Dict, Mapping, NoReturn

from posenc_export.models.families.shared import family, plain
from posenc_export.models.families.shared.encoders import reading_layers
from posenc_export.models.families.shared.rules import (
    Rule,
    Table,
    biases_without_keys,
    keys_and_values,
    same,
)

NORM = {"name": "layer", "epsilon": 1e-5}
# Keys of training, of other tasks, of transformers' `generate` and of the other part.
UNREAD = """apply_spec_augment begin_suppress_tokens classifier_proj_size forced_decoder_ids
    is_encoder_decoder mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length
    mask_time_min_masks mask_time_prob max_length median_filter_width suppress_tokens
    use_weighted_layer_sum num_mel_bins tie_word_embeddings vocab_size""".split()
# Keys of each part, without the part's prefix, to the names in models with one part.
PART_KEYS = {
    "layers": "num_hidden_layers",
    "attention_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
}
POSITIONS = {"encoder": "max_source_positions", "decoder": "max_target_positions"}


def keys_of(part: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function that selects the keys of one part, under their usual names."""

    def keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {f"{part}_{name}": usual for name, usual in PART_KEYS.items()}
        own[POSITIONS[part]] = "max_position_embeddings"
        names = (*PART_KEYS, "layerdrop")
        theirs = {f"{other}_{name}" for other in POSITIONS for name in names}
        theirs |= {*POSITIONS.values(), *PART_KEYS.values()}
        rest = {key: value for key, value in config.items() if key not in theirs}
        rest |= {usual: config[key] for key, usual in own.items() if key in config}
        return {**rest, "decoder_layers": config.get("decoder_layers")}

    return keys


def describe(config: family.Settings) -> NoReturn:
    """Refuse the whole model: only its parts can be exported."""
    raise ValueError(
        "whisper: expected part encoder or decoder, got none; give part='encoder' or part='decoder'"
    )


def describe_encoder(config: family.Settings) -> family.StackConfig:
    """Describe the encoder: two frames a token to keys and values of the decoder."""
    kind = _layer(config, "both")
    channels, size = config.whole("num_mel_bins"), 2 * config.whole("decoder_layers") * config.width
    _unread(config)
    # The activation is fixed; activation_function applies to layers.
    features = {"name": "convolutions", "channels": channels, "activation": "gelu"}
    tokens = family.TokensConfig(features=features, encodings=(plain.learned(config),))
    key_values, order = family.KeyValuesConfig(size=size, bias=True), ("layer",) * config.layers
    return family.stack(config, {"layer": kind}, order, tokens, norm=NORM, key_values=key_values)


def describe_decoder(config: family.Settings) -> family.StackConfig:
    """Describe the decoder."""
    kind = _layer(config, "causal")
    tied, vocabulary = config.flag("tie_word_embeddings", True), config.whole("vocab_size")
    projection = {"name": "queries", "bias": True, "output_bias": True}
    layers = reading_layers(kind, config.whole("decoder_layers"), projection)
    _unread(config)
    tokens = family.TokensConfig(vocabulary=vocabulary, encodings=(plain.learned(config),))
    return family.stack(config, *layers, tokens, norm=NORM, head=family.HeadConfig(tied=tied))


def _layer(config: family.Settings, sees: str) -> family.LayerConfig:
    attention = plain.attention(config, bias=True, sees={"name": sees})
    return family.layer_of(attention, plain.mlp(config, "activation_function", "gelu"), NORM)


def _unread(config: family.Settings) -> None:
    # False in all published models; transformers does not read it.
    config.fixed({"scale_embedding": False})
    config.ignore(UNREAD)


def _layer_rules(ours: str, theirs: str) -> Dict[str, Rule]:
    """Return the rules of self-attention and MLP. Keys have no bias."""
    bias = biases_without_keys(theirs + "self_attn.q_proj.bias", theirs + "self_attn.v_proj.bias")
    return {**plain.fairseq_layer(ours, theirs), ours + "attention.projection.qkv.bias": bias}


def names_of_encoder(description: family.StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rule for keys and values of cross-attention, stored in the decoder."""
    read = "model.decoder.layers.{row}.encoder_attn."
    layers = int(config["decoder_layers"])
    return {"head.linear": keys_and_values(read + "k_proj", read + "v_proj", layers, k_bias=False)}


def names_of_decoder(description: family.StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules. Layers 2i and 2i + 1 of our model are layer i of the checkpoint."""
    table: Dict[str, Rule] = {}
    for row in range(len(description.order) // 2):
        theirs, reading = f"model.decoder.layers.{row}.", f"layers.{2 * row + 1}."
        table |= _layer_rules(f"layers.{2 * row}.", theirs) | _layer_rules(reading, theirs)
        table[reading + "residual.attention_norm"] = same(theirs + "encoder_attn_layer_norm")
        table[reading + "attention.projection.query"] = same(theirs + "encoder_attn.q_proj")
        table[reading + "attention.projection.output"] = same(theirs + "encoder_attn.out_proj")
    return table


ENCODER: Table = {
    "tokens.stem.first": same("model.encoder.conv1"),
    "tokens.stem.second": same("model.encoder.conv2"),
    "token_encoding.table": same("model.encoder.embed_positions"),
    **_layer_rules("layers.{layer}.", "model.encoder.layers.{layer}."),
    "norm": same("model.encoder.layer_norm"),
}
DECODER: Table = {
    "tokens.embedding": same("model.decoder.embed_tokens"),
    "token_encoding.table": same("model.decoder.embed_positions"),
    "norm": same("model.decoder.layer_norm"),
    "head.linear": same("proj_out"),
}
OF_DECODER = r"^(model\.)?decoder\.(?!layers\.\d+\.encoder_attn\.[kv]_proj\.)"
PARTS = {
    "encoder": family.Family(
        describe_encoder,
        ENCODER,
        unused=(OF_DECODER, r"^proj_out\."),
        further_weights=names_of_encoder,
        keys=keys_of("encoder"),
    ),
    "decoder": family.Family(
        describe_decoder,
        DECODER,
        unused=(r"^(model\.)?encoder\.", r"encoder_attn\.[kv]_proj\."),
        further_weights=names_of_decoder,
        keys=keys_of("decoder"),
    ),
}
FAMILY = family.Family(describe, {}, keys=keys_of("encoder"), parts=PARTS)
