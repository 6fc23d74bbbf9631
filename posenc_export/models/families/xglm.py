"""XGLM (Lin et al. 2021, Few-shot Learning with Multilingual Language Models): GPT-2 with
fairseq's sinusoids, in which the first token has row 2.
"""

import math

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER, alike, decoder
from posenc_export.models.families.shared.plain import attention, fairseq_layer, layer
from posenc_export.models.families.shared.rules import OURS, Table, same

WEIGHTS: Table = {
    "tokens.embedding": same("model.embed_tokens"),
    **fairseq_layer(OURS, LAYER),
    "norm": same("model.layer_norm"),
    "head.linear": same("lm_head"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. transformers sets the sinusoids at row pad_token_id to zero, which
    has no effect for rows 0 and 1.
    """
    config.only("add_cross_attention", False, False)
    if (padding := config.values.get("pad_token_id")) not in (None, 0, 1):
        raise ValueError(
            f"xglm: expected pad_token_id to be null, 0 or 1, got {padding!r}, which is the "
            "row of a position; correct config.json"
        )
    sinusoids = {"name": "sinusoidal", "layout": "halves", "divisor": "fairseq", "offset": 2}
    scale = math.sqrt(config.width) if config.flag("scale_embedding", True) else 1.0
    hidden = config.whole("intermediate_size")
    activation = config.activation("activation_function", "gelu")
    kind = layer(
        attention(config, bias=True), {"name": "layer", "epsilon": 1e-5}, hidden, activation
    )
    return decoder(
        config, *alike(kind, config.layers, []), tied=True, scale=scale, encodings=(sinusoids,)
    )


FAMILY = Family(describe, WEIGHTS, unused=(r"\.embed_positions\.weights$",))
