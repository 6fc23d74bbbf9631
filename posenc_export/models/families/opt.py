"""OPT (Zhang et al. 2022): GPT-2 with ReLU; the position table begins with two unused rows."""

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
from posenc_export.models.families.shared.rules import OURS, Table, rows_from, same

WEIGHTS: Table = {
    "tokens.embedding": same("model.decoder.embed_tokens"),
    "token_encoding.table": rows_from("model.decoder.embed_positions", 2),
    **plain.fairseq_layer(OURS, "model.decoder.layers.{layer}."),
    "norm": same("model.decoder.final_layer_norm"),
    "head.linear": same("lm_head"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder, post-norm without do_layer_norm_before; then it has no final norm."""
    config.fixed({"word_embed_proj_dim": config.width})
    before, bias = config.flag("do_layer_norm_before", True), config.flag("enable_bias", True)
    removed = config.flag("_remove_final_layer_norm", False)
    trained = config.flag("layer_norm_elementwise_affine", True)
    norm = {"name": "layer", "epsilon": 1e-5, "weight": trained, "bias": trained}
    mlp = plain.mlp(config, "activation_function", "relu", bias=bias)
    kind = layer_of(plain.attention(config, bias), mlp, norm, "pre" if before else "post")
    last = norm if before and not removed else {"name": "none"}
    learned = plain.learned(config)
    return gated.uniform(config, kind, [], tied=True, norm=last, encodings=(learned,))


FAMILY = Family(describe, WEIGHTS, unused=(r"decoder\.version$",))
