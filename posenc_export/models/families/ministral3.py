"""Ministral 3 (Mistral AI 2025): Mistral with queries scaled by position (Nakanishi 2025)."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.hugging_face import rope_spec


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Queries are multiplied by 1 + llama_4_scaling_beta log(1 + floor(p /
    original_max_position_embeddings)), before the rotation, which gives the same result.
    """
    config.needs("num_key_value_heads", "head_dim", "rope_parameters")
    keys = config.rotation_keys()
    parameters = dict(keys["rope_parameters"] or {})
    beta = parameters.pop("llama_4_scaling_beta", None)
    parameters.pop("max_position_embeddings", None)
    rotation = rope_spec({**keys, "rope_parameters": parameters})
    scaled = rotation.get("name") == "rope_yarn" and isinstance(beta, (int, float))
    if not scaled or "rotary" in rotation:
        rule = "rope_parameters of type yarn for whole heads with llama_4_scaling_beta"
        raise config.refusal(rule, {**parameters, "llama_4_scaling_beta": beta})
    period = rotation["original_max_positions"]
    steps = {"name": "logn", "form": "steps", "first": 0}
    temperature = {**steps, "temperature": float(beta), "period": period}
    window = config.window("sliding_window", None)
    kind = gated.layer(config, gated.attention(config))
    return gated.uniform(config, gated.windowed(config, kind, window), [temperature, rotation])


FAMILY = Family(describe, gated.WEIGHTS)
