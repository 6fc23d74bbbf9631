"""Phi-3, Phi-3.5 and Phi-4-mini (Abdin et al. 2024, Phi-3 Technical Report): Llama's shape with packed projections, LongRoPE, partial rotation."""

from posenc_export.models.config import DecoderConfig
from posenc_export.models.families.gated import LAYER, gated
from posenc_export.models.families.gated import WEIGHTS as SHARED
from posenc_export.models.families.rules import Part, Same, Table
from posenc_export.models.families.settings import Settings

WEIGHTS: Table = {
    **SHARED,
    "layers.{layer}.attention.qkv": Same(LAYER + "self_attn.qkv_proj"),
    "layers.{layer}.mlp.gate": Part(LAYER + "mlp.gate_up_proj", 0, 2),
    "layers.{layer}.mlp.up": Part(LAYER + "mlp.gate_up_proj", 1, 2),
}


def describe(config: Settings) -> DecoderConfig:
    """Phi-4-mini names biases that it has not, and two factors of 1."""
    for key, value in {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1}.items():
        config.only(key, value, value)
    config.window("sliding_window", None)
    encoding = config.rotation(partial=True)
    if encoding["name"] not in ("rope", "rope_longrope"):  # transformers 5 reads yarn as longrope here
        raise ValueError(f"phi3: rope_type is default or longrope, got {encoding['name'].removeprefix('rope_')}; correct config.json")
    return gated(config, encoding)
