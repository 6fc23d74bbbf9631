"""RoBERTa (Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2020), CamemBERT (Martin et al. 2020):
BERT with positions that begin at row padding_idx + 1.
"""

from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Positions count all valid tokens; transformers does not count
    padding ids inside a row.
    """
    return post_norm(config, unused=config.padding(1) + 1)


FAMILY = encoder(describe, "roberta.")
