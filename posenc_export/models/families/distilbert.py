"""DistilBERT (Sanh et al. 2019): BERT without segments, with other tensor names."""

from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Settings, StackConfig
from posenc_export.models.families.shared.rules import OURS, QKV, Table, joined, same

LAYER = "distilbert.transformer.layer.{layer}."
WEIGHTS: Table = {
    QKV: joined(LAYER + "attention.q_lin", LAYER + "attention.k_lin", LAYER + "attention.v_lin"),
    OURS + "attention.projection.output": same(LAYER + "attention.out_lin"),
    OURS + "residual.attention_norm": same(LAYER + "sa_layer_norm"),
    OURS + "mlp.up": same(LAYER + "ffn.lin1"),
    OURS + "mlp.down": same(LAYER + "ffn.lin2"),
    OURS + "residual.mlp_norm": same(LAYER + "output_layer_norm"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. With sinusoidal_pos_embds the position table holds sinusoids."""
    config.flag("sinusoidal_pos_embds", False)
    config.take("tie_weights_", None)
    return post_norm(config, 0, segments=0, activation="activation", epsilon=1e-12)


FAMILY = encoder(describe, "distilbert.", WEIGHTS)
