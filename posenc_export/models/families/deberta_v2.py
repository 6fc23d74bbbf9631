"""DeBERTa-v2 and v3 (He et al. 2021, DeBERTaV3): log buckets of distances, shared projections."""

from typing import Any, Mapping

from posenc_export.models.families.deberta import POSITIONS, distances, terms
from posenc_export.models.families.shared import rules
from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Settings, StackConfig

LAYER = "deberta.encoder.layer.{layer}.attention.self."
WEIGHTS: rules.Table = {
    rules.QKV: rules.joined(LAYER + "query_proj", LAYER + "key_proj", LAYER + "value_proj"),
    rules.ENCODING + ".table": rules.whole("deberta.encoder.rel_embeddings.weight"),
    rules.ENCODING + ".of_keys": rules.same(LAYER + "pos_key_proj"),
    rules.ENCODING + ".of_queries": rules.same(LAYER + "pos_query_proj"),
}
SHARED: rules.Table = {
    rules.ENCODING + ".of_keys": rules.same(LAYER + "key_proj"),
    rules.ENCODING + ".of_queries": rules.same(LAYER + "query_proj"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Without position_buckets every distance has a row."""
    config.fixed({"conv_kernel_size": 0, "attention_head_size": config.width // config.heads})
    config.flag("share_att_key", False)
    config.choice("norm_rel_ebd", ("none", "layer_norm"))
    relative, buckets = distances(config), config.integer("position_buckets", -1)
    if buckets > 0 and (buckets % 2 or buckets >= relative):
        rule = f"position_buckets to be -1, or even and below max_relative_positions {relative}"
        raise config.refusal(rule, buckets)
    span = {"version": "v1", "span": relative}
    if buckets > 0:
        span = {"version": "v2", "span": buckets, "max_relative": relative}
    return post_norm(config, None, [{"name": "deberta", **terms(config), **span}])


def lines(description: StackConfig, config: Mapping[str, Any]) -> rules.Table:
    """Return the rules for rows and projections of distances."""
    table = dict(SHARED) if config.get("share_att_key") else {}
    if config.get("norm_rel_ebd") == "layer_norm":
        rows, norm = "deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm"
        table[rules.ENCODING + ".table"] = rules.normalised_rows(
            rows, norm, config["layer_norm_eps"]
        )
    return table


FAMILY = encoder(describe, "deberta.", WEIGHTS, (POSITIONS,), lines)
