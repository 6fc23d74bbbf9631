"""RoBERTa (Liu et al. 2019), XLM-RoBERTa, CamemBERT: BERT with positions after padding_idx."""

from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Positions count all tokens; transformers skips padding ids in a row."""
    return post_norm(config, unused=config.padding() + 1)


FAMILY = encoder(describe, "roberta.")
