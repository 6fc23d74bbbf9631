"""BERT (Devlin et al. 2018): learned positions, post-norm layers, bidirectional attention."""

from posenc_export.models.families.shared.encoders import UNUSED, one_segment, post_norm, weights
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.plain import table_rows


def describe(config: Settings) -> StackConfig:
    """Describe the encoder up to hidden states, without pooler and task heads."""
    return post_norm(
        config,
        [{"name": "learned"}],
        [],
        table_rows(config),
        config.integer("type_vocab_size", least=0),
    )


FAMILY = Family(
    describe, weights("bert."), base="bert.", unused=UNUSED, further_weights=one_segment("bert.")
)
