"""DeBERTa-v2 and v3 (He et al. 2021, DeBERTaV3): DeBERTa with log buckets of distances, which
may share the projections of content.
"""

from typing import Any, Mapping

from posenc_export.models.families.deberta import POSITIONS, distances, terms
from posenc_export.models.families.shared.encoders import UNUSED, one_segment, post_norm, weights
from posenc_export.models.families.shared.family import UNSUPPORTED, Family, Settings, StackConfig
from posenc_export.models.families.shared.rules import (
    ENCODING,
    QKV,
    Table,
    joined,
    normalised_rows,
    same,
    whole,
)

LAYER = "deberta.encoder.layer.{layer}.attention.self."
WEIGHTS: Table = {
    **weights("deberta."),
    QKV: joined(LAYER + "query_proj", LAYER + "key_proj", LAYER + "value_proj"),
    ENCODING + ".table": whole("deberta.encoder.rel_embeddings.weight"),
    ENCODING + ".of_keys": same(LAYER + "pos_key_proj"),
    ENCODING + ".of_queries": same(LAYER + "pos_query_proj"),
}
SHARED: Table = {
    ENCODING + ".of_keys": same(LAYER + "key_proj"),
    ENCODING + ".of_queries": same(LAYER + "query_proj"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Without position_buckets, every distance has a row. The convolution
    after the first layer (v2-xlarge, v2-xxlarge) is refused.
    """
    config.only("conv_kernel_size", 0, 0)
    config.only("attention_head_size", config.width // config.heads, config.width // config.heads)
    config.flag("share_att_key", False)
    norm = config.take("norm_rel_ebd", "none")
    if norm not in ("none", "layer_norm"):
        raise ValueError(
            f"deberta-v2: expected norm_rel_ebd to be none or layer_norm, got {norm!r}; "
            f"{UNSUPPORTED}"
        )
    relative, buckets = distances(config), config.take("position_buckets", -1)
    if (
        isinstance(buckets, bool)
        or not isinstance(buckets, int)
        or (buckets > 0 and (buckets % 2 or buckets >= relative))
    ):
        rule = "expected position_buckets to be -1, or even and below max_relative_positions"
        raise ValueError(f"deberta-v2: {rule}, got {buckets!r} and {relative}; correct config.json")
    by_bucket = {"version": "v2", "span": buckets, "max_relative": relative}
    encoding = {
        "name": "deberta",
        **terms(config),
        **(by_bucket if buckets > 0 else {"version": "v1", "span": relative}),
    }
    return post_norm(
        config, [], [encoding], config.max_positions, config.integer("type_vocab_size", least=0)
    )


def lines(description: StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules for rows and projections of distances, and for a single token type."""
    norm = normalised_rows(
        "deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm", config["layer_norm_eps"]
    )
    table: Table = {ENCODING + ".table": norm} if config.get("norm_rel_ebd") == "layer_norm" else {}
    return {
        **one_segment("deberta.")(description, config),
        **table,
        **(SHARED if config.get("share_att_key") else {}),
    }


FAMILY = Family(
    describe, WEIGHTS, base="deberta.", unused=(*UNUSED, POSITIONS), further_weights=lines
)
