"""DeepSeek-V3 and R1 (DeepSeek-AI 2024): latent attention, experts from the best groups."""

import math
from typing import Any, Mapping, Optional, Tuple

from posenc_export.models.config import AttentionConfig
from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import (
    Family,
    LayerConfig,
    Settings,
    StackConfig,
)
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import (
    OURS,
    Table,
    experts,
    keys_then_values,
    rotated_first,
    same,
    whole,
)

EPSILON = 1e-6  # epsilon of norms inside attention; rms_norm_eps applies to other norms
# Keys of published configs that transformers does not read, with the value that all published
# models have.
FIXED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def latent(config: Settings) -> AttentionConfig:
    """Describe latent attention without a rotation. The shared entries of keys are the first."""
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    own, rotary, value = map(config.whole, sizes)
    config.only("num_key_value_heads", config.heads)
    projection = {
        "name": "latent",
        "rotary": rotary,
        "value_size": value,
        "rank": config.whole("kv_lora_rank"),
        "query_rank": config.whole("q_lora_rank", 0),
        "bias": config.flag("attention_bias", False),
        "epsilon": EPSILON,
    }
    heads, size = config.heads, own + rotary
    return AttentionConfig(heads=heads, kv_heads=heads, head_size=size, projection=projection)


def _rotated(config: Settings, dense: LayerConfig) -> LayerConfig:
    rotary, size = dense.attention.projection["rotary"], dense.attention.head_size
    config.fixed({"head_dim": rotary, "qk_head_dim": size})
    layout = "interleaved" if config.flag("rope_interleave", True) else "half"
    rotation = {**config.rotation(layout=layout), "rotary": rotary}
    if rotation["name"] == "rope_proportional":
        rule = "a rope_type that rotates all entries of qk_rope_head_dim"
        raise config.error(rule, "proportional", "choose another rope_type")
    return dense.with_attention(encodings=(rotation,), scale=_scale(rotation, size))


def _scale(rotation: Mapping[str, Any], size: int) -> Optional[float]:
    """Return the factor on scores with YaRN's squared magnitude; None without mscale_all_dim."""
    if not rotation.get("mscale_all_dim"):
        return None
    stretch = 0.1 * rotation["mscale_all_dim"] * math.log(max(rotation["factor"], 1.0))
    return size**-0.5 * (1 + stretch) ** 2


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Layers for multi-token prediction are left out."""
    config.fixed(FIXED)
    config.ignore(("num_nextn_predict_layers", "num_mtp_layers"))
    config.needs("q_lora_rank")
    dense = _rotated(config, gated.layer(config, latent(config)))
    first = config.integer("first_k_dense_replace", least=0)
    kinds = {"dense": dense, "experts": with_experts(config, dense, "n_routed_experts")}
    order = ["dense" if index < first else "experts" for index in range(config.layers)]
    return gated.of_kinds(config, kinds, order)


def with_experts(config: Settings, dense: LayerConfig, experts: str) -> LayerConfig:
    """Return the layer with experts in place of its MLP. experts: key of their number."""
    inner = config.whole("moe_intermediate_size")
    groups, kept = config.whole("n_group"), config.whole("topk_group")
    return gated.with_experts(
        dense.with_mlp(hidden=inner),
        config.whole(experts),
        config.whole("num_experts_per_tok"),
        "sigmoid_of_chosen" if config.flag("norm_topk_prob", True) else "sigmoid",
        choice={"name": "groups", "groups": groups, "kept": kept},
        factor=config.number("routed_scaling_factor"),
        shared=inner * config.whole("n_shared_experts"),
    )


def queries(description: StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rule for the projection of queries, whose name depends on q_lora_rank."""
    ranked = config.get("q_lora_rank")
    return {PROJECTION + "query_up": rotated_first(READ + ("q_b_proj" if ranked else "q_proj"))}


def _prediction_layers(description: StackConfig, config: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return a pattern of the layers for multi-token prediction, which follow the model's last."""
    if not config.get("num_nextn_predict_layers", config.get("num_mtp_layers")):
        return ()
    inside = "|".join(str(index) for index in range(len(description.order)))
    return (rf"^model\.layers\.(?!(?:{inside})\.)",)


PROJECTION, READ, FEED = OURS + "attention.projection.", LAYER + "self_attn.", LAYER + "mlp."
LATENT: Table = {
    PROJECTION + "query_down": same(READ + "q_a_proj"),
    PROJECTION + "query_norm": same(READ + "q_a_layernorm"),
    PROJECTION + "down": same(READ + "kv_a_proj_with_mqa"),
    PROJECTION + "norm": same(READ + "kv_a_layernorm"),
    PROJECTION + "up": keys_then_values(READ + "kv_b_proj"),
}
MLP = ("gate", "up", "down")
EXPERTS: Table = {
    OURS + "mlp.choose.correction": whole(FEED + "gate.e_score_correction_bias"),
    **experts(FEED + "gate", *(FEED + f"experts.{{row}}.{name}_proj.weight" for name in MLP)),
    **{OURS + f"mlp.shared.{name}": same(FEED + f"shared_experts.{name}_proj") for name in MLP},
}
WEIGHTS = {**gated.WEIGHTS, **LATENT, **EXPERTS}
FAMILY = Family(describe, WEIGHTS, further_weights=queries, further_unused=_prediction_layers)
