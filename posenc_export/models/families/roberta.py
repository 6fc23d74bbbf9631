"""RoBERTa (Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2020), CamemBERT (Martin et al. 2020):
BERT with positions that begin at row padding_idx + 1.
"""

from posenc_export.models.families.shared.encoders import UNUSED, one_segment, post_norm, weights
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.plain import table_rows


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. Positions count all valid tokens; transformers does not count
    padding ids inside a row.
    """
    unused = config.padding(1) + 1
    return post_norm(
        config,
        [{"name": "learned", "offset": unused}],
        [],
        table_rows(config, unused),
        config.integer("type_vocab_size", least=0),
    )


FAMILY = Family(
    describe,
    weights("roberta."),
    base="roberta.",
    unused=UNUSED,
    further_weights=one_segment("roberta."),
)
