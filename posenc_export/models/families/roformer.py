"""RoFormer (Su et al. 2021): BERT's shape with rotation in place of learned positions, in the paper's layout of pairs."""

from posenc_export.models.config import StackConfig
from posenc_export.models.families import Family
from posenc_export.models.families.encoders import UNUSED, as_wide_as_model, one_segment, post_norm, segments, weights
from posenc_export.models.families.settings import Settings

SINES = r"encoder\.embed_positions\.weight$"  # saved, though they follow from its shape


def describe(config: Settings) -> StackConfig:
    """Queries and keys turn, values do not; theta is 10000."""
    config.only("rotary_value", False, False)
    as_wide_as_model(config)
    rotation = {"name": "rope", "layout": "interleaved"}
    return post_norm(config, [], [rotation], config.max_positions, segments(config))


FAMILY = Family(describe, weights("roformer."), base="roformer.", unused=(*UNUSED, SINES), further=one_segment("roformer."))
