"""Phi-3, Phi-3.5 and Phi-4-mini (Abdin et al. 2024, Phi-3 Technical Report): Llama with packed
projections, LongRoPE and partial rotation.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    LAYER,
    alike,
    attention,
    decoder,
    layer,
    windowed,
)
from posenc_export.models.families.shared.gated import WEIGHTS as SHARED
from posenc_export.models.families.shared.rules import QKV, Table, gate_and_up, same

WEIGHTS: Table = {
    **SHARED,
    QKV: same(LAYER + "self_attn.qkv_proj"),
    **gate_and_up(LAYER + "mlp.gate_up_proj"),
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Phi-4-mini's config has keys of biases that are always false, and
    two factors that are always 1.
    """
    config.fixed(
        {
            "attention_bias": False,
            "mlp_bias": False,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
        }
    )
    window, rotation = config.window("sliding_window", None), config.rotation(partial=True)
    if rotation["name"] not in (
        "rope",
        "rope_longrope",
    ):  # transformers 5 reads yarn as longrope here
        raise ValueError(
            "phi3: expected rope_type default or longrope, got "
            f"{rotation['name'].removeprefix('rope_')}; correct config.json"
        )
    return decoder(
        config,
        *alike(
            windowed(config, layer(config, attention(config)), window), config.layers, [rotation]
        ),
    )


FAMILY = Family(describe, WEIGHTS)
