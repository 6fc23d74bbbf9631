"""MPNet (Song et al. 2020): BERT's shape without segments, learned positions from 2 on, and T5's buckets as a bias that all layers share."""

from posenc_export.models.config import StackConfig
from posenc_export.models.families import Family
from posenc_export.models.families.encoders import ENCODING, OURS, QKV, UNUSED, post_norm, table_rows, weights
from posenc_export.models.families.rules import Joined, Same, Table
from posenc_export.models.families.settings import Settings

LAYER = "mpnet.encoder.layer.{layer}.attention."
WEIGHTS: Table = {
    **weights("mpnet."),
    ENCODING + ".table": Same("mpnet.encoder.relative_attention_bias"),
    QKV: Joined(LAYER + "attn.q", LAYER + "attn.k", LAYER + "attn.v"),
    OURS + "attention.projection.output": Same(LAYER + "attn.o"),
    OURS + "residual.attention_norm": Same(LAYER + "LayerNorm"),
}
UNUSED_ROWS = 2  # padding_idx is 1 whatever config.json says


def describe(config: Settings) -> StackConfig:
    """32 buckets whatever config.json says, as transformers reads no other number."""
    config.only("relative_attention_num_buckets", 32, 32)
    buckets = {"name": "t5", "buckets": 32, "max_distance": 128, "scores": "scaled"}
    return post_norm(config, [{"name": "learned", "offset": UNUSED_ROWS}], [buckets], table_rows(config, UNUSED_ROWS), 0)


FAMILY = Family(describe, WEIGHTS, base="mpnet.", unused=UNUSED)
