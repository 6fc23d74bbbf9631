"""DeBERTa (He et al. 2021): BERT with scores of content and distance in place of positions."""

from posenc_export.models.families.shared import rules
from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import UNSUPPORTED, Named, Settings, StackConfig

LAYER = "deberta.encoder.layer.{layer}.attention.self."
WEIGHTS: rules.Table = {
    rules.QKV + ".weight": rules.grouped(LAYER + "in_proj"),
    rules.QKV + ".bias": rules.biases_without_keys(LAYER + "q_bias", LAYER + "v_bias"),
    rules.ENCODING + ".table": rules.whole("deberta.encoder.rel_embeddings.weight"),
    rules.ENCODING + ".of_keys": rules.same(LAYER + "pos_proj"),
    rules.ENCODING + ".of_keys.bias": rules.no_bias(),
    rules.ENCODING + ".of_queries": rules.same(LAYER + "pos_q_proj"),
}
# Without position_biased_input, only the mask decoder of pretraining uses it.
POSITIONS = r"embeddings\.position_embeddings\._?weight$"
# Sorted pos_att_type to our name.
TERMS = {("c2p", "p2c"): "both", ("c2p",): "c2p", ("p2c",): "p2c"}


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Distances from max_relative_positions on share the last row."""
    config.fixed({"talking_head": False})
    span = {"version": "v1", "span": distances(config)}
    return post_norm(config, None, [{"name": "deberta", **span, **terms(config)}])


def terms(config: Settings) -> Named:
    """Return the parameter `terms` from pos_att_type; empty for both terms, the default."""
    value = config.take("pos_att_type")
    names = [term.strip() for term in value.lower().split("|")] if isinstance(value, str) else value
    name = TERMS.get(tuple(sorted(names, key=str))) if isinstance(names, list) else None
    if name is None:
        raise config.refusal("pos_att_type to be c2p, p2c or both", value, UNSUPPORTED)
    return {} if name == "both" else {"terms": name}


def distances(config: Settings) -> int:
    """Return the number of distances in each direction; take the keys that all versions share."""
    config.only("relative_attention", True, False)
    config.only("position_biased_input", False, True)
    config.fixed({"embedding_size": config.width})
    relative = config.integer("max_relative_positions", -1)
    return relative if relative > 0 else config.trained_positions


FAMILY = encoder(describe, "deberta.", WEIGHTS, (POSITIONS,))
