"""MPNet (Song et al. 2020): BERT without segments, T5's relative bias shared by all layers."""

from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Settings, StackConfig
from posenc_export.models.families.shared.rules import ENCODING, OURS, QKV, Table, joined, same

LAYER = "mpnet.encoder.layer.{layer}.attention."
WEIGHTS: Table = {
    ENCODING + ".table": same("mpnet.encoder.relative_attention_bias"),
    QKV: joined(LAYER + "attn.q", LAYER + "attn.k", LAYER + "attn.v"),
    OURS + "attention.projection.output": same(LAYER + "attn.o"),
    OURS + "residual.attention_norm": same(LAYER + "LayerNorm"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. transformers uses 32 buckets and padding_idx 1 for all configs."""
    config.fixed({"relative_attention_num_buckets": 32})
    buckets = {"name": "t5", "buckets": 32, "max_distance": 128, "scores": "scaled"}
    return post_norm(config, 2, [buckets], segments=0)


FAMILY = encoder(describe, "mpnet.", WEIGHTS)
