"""DeBERTa (He et al. 2021, Decoding-enhanced BERT with Disentangled Attention): BERT's shape, scores from content and distance, no absolute positions."""

from posenc_export.models.config import Named, StackConfig
from posenc_export.models.families import Family
from posenc_export.models.families.encoder_rules import Biases, NoBias
from posenc_export.models.families.encoders import ENCODING, QKV, UNUSED, as_wide_as_model, one_segment, post_norm, segments, weights
from posenc_export.models.families.rules import Grouped, Same, Table, Whole
from posenc_export.models.families.settings import Settings

LAYER = "deberta.encoder.layer.{layer}.attention.self."
WEIGHTS: Table = {
    **weights("deberta."),
    QKV + ".weight": Grouped(LAYER + "in_proj"),
    QKV + ".bias": Biases(LAYER + "q_bias", LAYER + "v_bias"),
    ENCODING + ".table": Whole("deberta.encoder.rel_embeddings.weight"),
    ENCODING + ".of_keys": Same(LAYER + "pos_proj"),
    ENCODING + ".of_keys.bias": NoBias(),
    ENCODING + ".of_queries": Same(LAYER + "pos_q_proj"),
}
POSITIONS = r"embeddings\.position_embeddings\._?weight$"  # read by the mask decoder of pretraining alone where position_biased_input is false
TERMS = {("c2p", "p2c"): "both", ("c2p",): "c2p", ("p2c",): "p2c"}  # pos_att_type in order: our name


def describe(config: Settings) -> StackConfig:
    """Distances from max_relative_positions on share the last row of their side."""
    config.only("talking_head", False, False)
    relative = distances(config)
    encoding = {"name": "deberta", "version": "v1", "span": relative, **terms(config)}
    return post_norm(config, [], [encoding], config.max_positions, segments(config))


def terms(config: Settings) -> Named:
    """Which of the two terms of distances there are, as a parameter of the encoding; nothing for both.

    Raises:
        ValueError: none of them, others.
    """
    given = config.take("pos_att_type")
    found = [term.strip() for term in given.lower().split("|")] if isinstance(given, str) else given
    name = TERMS.get(tuple(sorted(found, key=str)), "") if isinstance(found, list) else ""
    if not name:
        raise ValueError(f"{config.family}: pos_att_type is c2p, p2c or both, got {given!r}; nothing else of it can be exported yet")
    return {} if name == "both" else {"terms": name}


def distances(config: Settings) -> int:
    """The number of distances on each side; what all versions have but for buckets.

    Raises:
        ValueError: attention without distances, absolute positions beside them.
    """
    config.only("relative_attention", True, False)
    config.only("position_biased_input", False, True)
    as_wide_as_model(config)
    relative = config.take("max_relative_positions", -1)
    if isinstance(relative, bool) or not isinstance(relative, int):
        raise ValueError(f"{config.family}: max_relative_positions is a whole number, got {relative!r}; correct config.json")
    return relative if relative > 0 else config.trained_positions


FAMILY = Family(describe, WEIGHTS, base="deberta.", unused=(*UNUSED, POSITIONS), further=one_segment("deberta."))
