"""XGLM (Lin et al. 2021, Few-shot Learning with Multilingual Language Models): GPT-2's shape with fairseq's sinusoids, whose first token is at position 2."""

import math

from posenc_export.models.config import StackConfig
from posenc_export.models.families import Family
from posenc_export.models.families.gated import LAYER, OURS, QKV, alike, decoder
from posenc_export.models.families.plain import attention, layer
from posenc_export.models.families.rules import Joined, Same, Table
from posenc_export.models.families.settings import GIVEN, Settings

WEIGHTS: Table = {
    "tokens.embedding": Same("model.embed_tokens"),
    OURS + "residual.attention_norm": Same(LAYER + "self_attn_layer_norm"),
    QKV: Joined(LAYER + "self_attn.q_proj", LAYER + "self_attn.k_proj", LAYER + "self_attn.v_proj"),
    OURS + "attention.projection.output": Same(LAYER + "self_attn.out_proj"),
    OURS + "residual.mlp_norm": Same(LAYER + "final_layer_norm"),
    OURS + "mlp.up": Same(LAYER + "fc1"),
    OURS + "mlp.down": Same(LAYER + "fc2"),
    "norm": Same("model.layer_norm"),
    "head.linear": Same("lm_head"),
}


def describe(config: Settings) -> StackConfig:
    """transformers has zeros at the row of pad_token_id: tokens never read rows 0 and 1."""
    config.only("add_cross_attention", False, False)
    if config.padding_id not in (GIVEN, None, 0, 1):
        raise ValueError(f"xglm: pad_token_id is null, 0 or 1, got {config.padding_id!r}, the row of a position that is read; correct config.json")
    sinusoids = {"name": "sinusoidal", "layout": "halves", "divisor": "fairseq", "offset": 2}
    scale = math.sqrt(config.width) if config.flag("scale_embedding", True) else 1.0
    hidden, activation = config.whole("intermediate_size"), config.activation("activation_function", "gelu")
    kind = layer(attention(config, bias=True), {"name": "layer", "epsilon": 1e-5}, hidden, activation)
    return decoder(config, *alike(kind, config.layers, []), tied=True, scale=scale, encodings=(sinusoids,))


FAMILY = Family(describe, WEIGHTS, unused=(r"\.embed_positions\.weights$",))
