"""OPT (Zhang et al. 2022, Open Pre-trained Transformer Language Models): GPT-2 with ReLU; the
position table begins with two unused rows.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import alike, decoder
from posenc_export.models.families.shared.plain import attention, fairseq_layer, layer, learned
from posenc_export.models.families.shared.rules import OURS, Table, rows_from, same

WEIGHTS: Table = {
    "tokens.embedding": same("model.decoder.embed_tokens"),
    "token_encoding.table": rows_from("model.decoder.embed_positions", 2),
    **fairseq_layer(OURS, "model.decoder.layers.{layer}."),
    "norm": same("model.decoder.final_layer_norm"),
    "head.linear": same("lm_head"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Without do_layer_norm_before, layers are post-norm. Then, or with
    _remove_final_layer_norm, there is no final norm.
    """
    config.only("word_embed_proj_dim", config.width, config.width)
    before, bias = config.flag("do_layer_norm_before", True), config.flag("enable_bias", True)
    removed = config.flag("_remove_final_layer_norm", False)
    trained = config.flag("layer_norm_elementwise_affine", True)
    norm = {"name": "layer", "epsilon": 1e-5, "weight": trained, "bias": trained}
    hidden = config.whole("intermediate_size")
    activation = config.activation("activation_function", "relu")
    kind = layer(
        attention(config, bias), norm, hidden, activation, bias, "pre" if before else "post"
    )
    behind = norm if before and not removed else {"name": "none"}
    return decoder(
        config,
        *alike(kind, config.layers, []),
        tied=True,
        norm=behind,
        encodings=(learned(config),),
    )


FAMILY = Family(describe, WEIGHTS, unused=(r"decoder\.version$",))
