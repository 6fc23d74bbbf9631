"""The text model of Qwen3.5 (Qwen 2026): gated delta rules, every fourth layer attention."""

from dataclasses import replace

from posenc_export.models.families.shared import delta, gated, vision
from posenc_export.models.families.shared.delta import RULE
from posenc_export.models.families.shared.family import Settings, StackConfig


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Layers for multi-token prediction are left out."""
    config.fixed({"attn_output_gate": True, "mlp_only_layers": []})
    unused = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    config.ignore(unused)
    rotation = vision.rotation_of_axes(config, 10000.0, (11, 11, 10), partial=True, share=0.25)
    kinds = delta.with_gates(config, rotation)
    return gated.of_kinds(config, kinds, delta.types(config))


INPUTS = {part: f"{RULE}in_proj_{part}" for part in ("qkv", "z", "b", "a")}
WEIGHTS = {**delta.WITH_GATES, **delta.weights(delta.inputs(INPUTS))}
TEXT = vision.text_model(describe, WEIGHTS, vision.text_keys)
FAMILY = replace(TEXT, unused=(*TEXT.unused, delta.PREDICTION))
