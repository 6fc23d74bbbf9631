"""DeBERTa (He et al. 2021, Decoding-enhanced BERT with Disentangled Attention): BERT with scores
of content and distance, without absolute positions.
"""

from posenc_export.models.families.shared.encoders import UNUSED, one_segment, post_norm, weights
from posenc_export.models.families.shared.family import (
    UNSUPPORTED,
    Family,
    Named,
    Settings,
    StackConfig,
)
from posenc_export.models.families.shared.rules import (
    ENCODING,
    QKV,
    Table,
    biases_without_keys,
    grouped,
    no_bias,
    same,
    whole,
)

LAYER = "deberta.encoder.layer.{layer}.attention.self."
WEIGHTS: Table = {
    **weights("deberta."),
    QKV + ".weight": grouped(LAYER + "in_proj"),
    QKV + ".bias": biases_without_keys(LAYER + "q_bias", LAYER + "v_bias"),
    ENCODING + ".table": whole("deberta.encoder.rel_embeddings.weight"),
    ENCODING + ".of_keys": same(LAYER + "pos_proj"),
    ENCODING + ".of_keys.bias": no_bias(),
    ENCODING + ".of_queries": same(LAYER + "pos_q_proj"),
}
# Without position_biased_input, only the mask decoder of pretraining uses it.
POSITIONS = r"embeddings\.position_embeddings\._?weight$"
TERMS = {
    ("c2p", "p2c"): "both",
    ("c2p",): "c2p",
    ("p2c",): "p2c",
}  # sorted pos_att_type to our name


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Distances of max_relative_positions and more share the last row of
    their direction.
    """
    config.only("talking_head", False, False)
    relative = distances(config)
    encoding = {"name": "deberta", "version": "v1", "span": relative, **terms(config)}
    return post_norm(
        config, [], [encoding], config.max_positions, config.integer("type_vocab_size", least=0)
    )


def terms(config: Settings) -> Named:
    """Return the parameter `terms` of the encoding from pos_att_type; empty if both terms are
    used, which is the default.
    """
    given = config.take("pos_att_type")
    found = [term.strip() for term in given.lower().split("|")] if isinstance(given, str) else given
    name = TERMS.get(tuple(sorted(found, key=str)), "") if isinstance(found, list) else ""
    if not name:
        raise ValueError(
            f"{config.family}: expected pos_att_type to be c2p, p2c or both, got {given!r}; "
            f"{UNSUPPORTED}"
        )
    return {} if name == "both" else {"terms": name}


def distances(config: Settings) -> int:
    """Return the number of distances in each direction, and take the keys that all versions
    share.
    """
    config.only("relative_attention", True, False)
    config.only("position_biased_input", False, True)
    config.only("embedding_size", config.width, config.width)
    relative = config.integer("max_relative_positions", -1)
    return relative if relative > 0 else config.trained_positions


FAMILY = Family(
    describe,
    WEIGHTS,
    base="deberta.",
    unused=(*UNUSED, POSITIONS),
    further_weights=one_segment("deberta."),
)
