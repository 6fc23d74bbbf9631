"""BERT (Devlin et al. 2018): learned positions, post-norm layers, bidirectional attention."""

from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the encoder up to hidden states, without pooler and task heads."""
    return post_norm(config, unused=0)


FAMILY = encoder(describe, "bert.")
