"""Phi-3, Phi-3.5 and Phi-4-mini (Abdin et al. 2024): Llama with packed projections, LongRoPE."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import QKV, Table, gate_and_up, same

WEIGHTS: Table = {
    **gated.WEIGHTS,
    QKV: same(LAYER + "self_attn.qkv_proj"),
    **gate_and_up(LAYER + "mlp.gate_up_proj"),
}
# Keys of Phi-4-mini with the values that all published models have.
FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}


def describe(config: Settings) -> StackConfig:
    config.fixed(FIXED)
    window, rotation = config.window("sliding_window", None), config.rotation(partial=True)
    # Transformers 5 reads yarn as longrope here.
    if rotation["name"] not in ("rope", "rope_longrope"):
        kind = rotation["name"].removeprefix("rope_")
        raise config.error("rope_type default or longrope", kind)
    layer = gated.layer(config, gated.attention(config))
    return gated.uniform(config, gated.windowed(config, layer, window), [rotation])


FAMILY = Family(describe, WEIGHTS)
