"""Ministral 3 (Mistral AI 2025): Mistral with queries scaled by position (Nakanishi 2025,
Scalable-Softmax Is Superior for Attention).
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    WEIGHTS,
    alike,
    attention,
    decoder,
    layer,
    windowed,
)
from posenc_export.models.hugging_face import rope_spec


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Queries are multiplied by 1 + llama_4_scaling_beta log(1 + floor(p /
    original_max_position_embeddings)).

    The scaling is applied before the rotation, with the same result, since the two commute.
    """
    config.needs("num_key_value_heads", "head_dim", "rope_parameters")
    keys = config.rotation_keys()
    given = dict(keys["rope_parameters"] or {})
    beta, _ = given.pop("llama_4_scaling_beta", None), given.pop("max_position_embeddings", None)
    rotation = rope_spec({**keys, "rope_parameters": given})
    if (
        rotation.get("name") != "rope_yarn"
        or "rotary" in rotation
        or not isinstance(beta, (int, float))
    ):
        rule = "expected rope_parameters of type yarn for whole heads with llama_4_scaling_beta"
        raise ValueError(
            f"ministral3: {rule}, got {given} and llama_4_scaling_beta {beta}; correct config.json"
        )
    temperature = {
        "name": "logn",
        "form": "steps",
        "temperature": float(beta),
        "period": rotation["original_max_positions"],
        "first": 0,
    }
    kind = windowed(config, layer(config, attention(config)), config.window("sliding_window", None))
    return decoder(config, *alike(kind, config.layers, [temperature, rotation]))


FAMILY = Family(describe, WEIGHTS)
