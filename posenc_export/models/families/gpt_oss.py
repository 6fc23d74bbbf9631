"""gpt-oss (OpenAI 2025, gpt-oss-120b & gpt-oss-20b Model Card): sinks, biases, a window in every
second layer, experts with clamped units.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    LAYER,
    WEIGHTS,
    attention,
    decoder,
    layer,
    with_experts,
)
from posenc_export.models.families.shared.rules import OURS, Table, every_other_column, same, whole


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Without layer_types, layers 0, 2, 4, ... have a window. A config
    without rotary keys is refused: transformers has a YaRN default.
    """
    config.needs("num_key_value_heads", "head_dim", "sliding_window")
    rotation = config.rotation(theta=150000.0)
    bias = config.flag("attention_bias", True)
    window = config.window("sliding_window")
    if rotation["name"] != "rope_yarn":
        raise ValueError(
            "gpt_oss: expected rope_type yarn, got "
            f"{rotation['name'].removeprefix('rope_')}; give its rope_parameters"
        )
    config.only(
        "initial_context_length",
        rotation["original_max_positions"],
        rotation["original_max_positions"],
    )
    chosen = config.whole("num_experts_per_tok")
    config.only("experts_per_token", chosen, chosen)
    unit = {
        "name": "clamped",
        "alpha": config.number("swiglu_alpha", 1.702),
        "limit": config.number("swiglu_limit", 7.0),
    }
    kind = layer(config, attention(config, bias, bias, sinks=True))
    if kind.mlp["activation"] != "silu":
        raise ValueError(
            f"gpt_oss: expected hidden_act to be silu, got {kind.mlp['activation']}; correct "
            "config.json, since transformers ignores hidden_act"
        )
    kind = with_experts(
        kind, config.whole("num_local_experts"), chosen, "chosen", unit=unit, bias=True
    )
    types = [
        "full_attention" if index % 2 else "sliding_attention" for index in range(config.layers)
    ]
    return decoder(config, *config.by_type(kind, [rotation], window, types))


EXPERTS: Table = {
    OURS + "attention.sinks": whole(LAYER + "self_attn.sinks"),
    OURS + "mlp.router": same(LAYER + "mlp.router"),
    OURS + "mlp.gates": every_other_column(LAYER + "mlp.experts.gate_up_proj", 0),
    OURS + "mlp.gates_bias": every_other_column(LAYER + "mlp.experts.gate_up_proj_bias", 0),
    OURS + "mlp.ups": every_other_column(LAYER + "mlp.experts.gate_up_proj", 1),
    OURS + "mlp.ups_bias": every_other_column(LAYER + "mlp.experts.gate_up_proj_bias", 1),
    OURS + "mlp.downs": whole(LAYER + "mlp.experts.down_proj"),
    OURS + "mlp.downs_bias": whole(LAYER + "mlp.experts.down_proj_bias"),
}
FAMILY = Family(describe, {**WEIGHTS, **EXPERTS})
