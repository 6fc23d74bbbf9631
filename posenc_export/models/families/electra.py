"""ELECTRA (Clark et al. 2020): BERT. Small models, whose token table is narrower, are refused."""

from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe a discriminator or generator without its head."""
    config.only("embedding_size", config.width, 128)
    return post_norm(config, unused=0)


FAMILY = encoder(describe, "electra.")
