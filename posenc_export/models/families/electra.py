"""ELECTRA (Clark et al. 2020): BERT's architecture. Small models, whose token table is narrower
than the model, are refused.
"""

from posenc_export.models.families.shared.encoders import UNUSED, one_segment, post_norm, weights
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.plain import table_rows


def describe(config: Settings) -> StackConfig:
    """Describe a discriminator or generator without its head."""
    config.only("embedding_size", config.width, 128)
    return post_norm(
        config,
        [{"name": "learned"}],
        [],
        table_rows(config),
        config.integer("type_vocab_size", least=0),
    )


FAMILY = Family(
    describe,
    weights("electra."),
    base="electra.",
    unused=UNUSED,
    further_weights=one_segment("electra."),
)
