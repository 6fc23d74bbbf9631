"""XGLM (Lin et al. 2021): GPT-2 with fairseq's sinusoids, in which the first token has row 2."""

import math

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
from posenc_export.models.families.shared.rules import OURS, Table, same

WEIGHTS: Table = {
    "tokens.embedding": same("model.embed_tokens"),
    **plain.fairseq_layer(OURS, gated.LAYER),
    "norm": same("model.layer_norm"),
    "head.linear": same("lm_head"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. transformers sets row pad_token_id to zero: no position if 0 or 1."""
    config.fixed({"add_cross_attention": False})
    if (padding := config.values.get("pad_token_id")) not in (None, 0, 1):
        raise config.refusal("pad_token_id to be null, 0 or 1, which are no positions", padding)
    sinusoids = {"name": "sinusoidal", "layout": "halves", "divisor": "fairseq", "offset": 2}
    scale = math.sqrt(config.width) if config.flag("scale_embedding", True) else 1.0
    mlp = plain.mlp(config, "activation_function", "gelu")
    kind = layer_of(plain.attention(config, bias=True), mlp, {"name": "layer", "epsilon": 1e-5})
    return gated.uniform(config, kind, [], tied=True, scale=scale, encodings=(sinusoids,))


FAMILY = Family(describe, WEIGHTS, unused=(r"\.embed_positions\.weights$",))
