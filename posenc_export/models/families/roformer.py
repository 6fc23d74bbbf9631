"""RoFormer (Su et al. 2021): BERT with rotation of interleaved pairs, no learned positions."""

from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Settings, StackConfig

SINES = r"encoder\.embed_positions\.weight$"  # a table of sines and cosines, computed here


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Queries and keys are rotated with theta 10000, values are not."""
    config.fixed({"rotary_value": False, "embedding_size": config.width})
    return post_norm(config, None, [{"name": "rope", "layout": "interleaved"}])


FAMILY = encoder(describe, "roformer.", unused=(SINES,))
