"""RoFormer (Su et al. 2021): BERT with rotation of interleaved pairs in place of learned
positions.
"""

from posenc_export.models.families.shared.encoders import UNUSED, one_segment, post_norm, weights
from posenc_export.models.families.shared.family import Family, Settings, StackConfig

SINES = r"encoder\.embed_positions\.weight$"  # a table of sines and cosines, computed here


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Queries and keys are rotated with theta 10000, values are not."""
    config.only("rotary_value", False, False)
    config.only("embedding_size", config.width, config.width)
    rotation = {"name": "rope", "layout": "interleaved"}
    return post_norm(
        config, [], [rotation], config.max_positions, config.integer("type_vocab_size", least=0)
    )


FAMILY = Family(
    describe,
    weights("roformer."),
    base="roformer.",
    unused=(*UNUSED, SINES),
    further_weights=one_segment("roformer."),
)
