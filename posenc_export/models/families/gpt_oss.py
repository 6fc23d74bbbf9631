"""gpt-oss (OpenAI 2025): sinks, biases, a window in every second layer, clamped experts."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.rules import OURS, Table, every_other_column, same, whole


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. A config without rotary keys is refused (YaRN by default)."""
    config.needs("num_key_value_heads", "head_dim", "sliding_window")
    rotation = config.rotation(theta=150000.0)
    bias, window = config.flag("attention_bias", True), config.window("sliding_window")
    if rotation["name"] != "rope_yarn":
        kind_of_rotation = rotation["name"].removeprefix("rope_")
        raise config.error("rope_type yarn", kind_of_rotation, "give its rope_parameters")
    chosen = config.whole("num_experts_per_tok")
    trained = rotation["original_max_positions"]
    config.fixed({"initial_context_length": trained, "experts_per_token": chosen})
    alpha, limit = config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)
    unit = {"name": "clamped", "alpha": alpha, "limit": limit}
    kind = gated.layer(config, gated.attention(config, bias, bias, sinks=True))
    if (activation := kind.mlp["activation"]) != "silu":
        remedy = "correct config.json, since transformers ignores hidden_act"
        raise config.error("hidden_act to be silu", activation, remedy)
    count = config.whole("num_local_experts")
    kind = gated.with_experts(kind, count, chosen, "chosen", unit=unit, bias=True)
    return gated.decoder(config, config.by_type(kind, [rotation], window, config.full_every(2)))


EXPERTS = gated.LAYER + "mlp.experts."
TABLE: Table = {
    OURS + "attention.sinks": whole(gated.LAYER + "self_attn.sinks"),
    OURS + "mlp.router": same(gated.LAYER + "mlp.router"),
    OURS + "mlp.gates": every_other_column(EXPERTS + "gate_up_proj", 0),
    OURS + "mlp.gates_bias": every_other_column(EXPERTS + "gate_up_proj_bias", 0),
    OURS + "mlp.ups": every_other_column(EXPERTS + "gate_up_proj", 1),
    OURS + "mlp.ups_bias": every_other_column(EXPERTS + "gate_up_proj_bias", 1),
    OURS + "mlp.downs": whole(EXPERTS + "down_proj"),
    OURS + "mlp.downs_bias": whole(EXPERTS + "down_proj_bias"),
}
FAMILY = Family(describe, {**gated.WEIGHTS, **TABLE})
