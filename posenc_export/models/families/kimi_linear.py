"""Kimi Linear (Kimi Team 2025): gated delta rules with a decay for each entry of a key, latent
attention without positions, experts from the best groups.
"""

from typing import Any, List, Mapping

import msgspec

from posenc_export.models.config import AttentionConfig
from posenc_export.models.families.shared import delta, gated
from posenc_export.models.families.shared.delta import ATTENTION, DELTA, FULL, PROJECTION
from posenc_export.models.families.shared.family import (
    UNSUPPORTED,
    Family,
    LayerConfig,
    Settings,
    StackConfig,
)
from posenc_export.models.families.shared.rules import (
    OURS,
    Rule,
    Table,
    experts,
    keys_then_values,
    rotated_first,
    same,
    whole,
)

# Keys of published configs that transformers does not read, with the values of published models.
FIXED = {
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "mla_use_nope": True,
    "use_grouped_topk": True,
}
EPSILON = 1e-6  # epsilon of norms inside attention; rms_norm_eps applies to other norms
UNREAD = ("head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters")
NESTED, PLACES = "linear_attn_config", ("full_attn_layers", "kda_layers")
SIZES = {
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "short_conv_kernel_size": "conv_kernel_dim",
}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. linear_attn_config has sizes and places of gated delta rules, as
    published, or transformers' keys have them.
    """
    config.fixed(FIXED)
    config.ignore(UNREAD)
    config.flatten(NESTED)
    for nested in SIZES.keys() & (config.values.get(NESTED) or {}).keys():
        config.rename(f"{NESTED}.{nested}", f"linear_{SIZES[nested]}")
    heads, size, kernel = (config.whole(f"linear_{name}") for name in SIZES.values())
    full = gated.layer(config, _latent(config))
    parts = {
        "value_size": size,
        "kernel": kernel,
        "rank": size,
        "epsilon": full.norms[0]["epsilon"],
    }
    rule = AttentionConfig(
        heads=heads,
        kv_heads=heads,
        head_size=size,
        mechanism="gated_delta",
        projection={"name": "gated_delta", **parts},
    )
    kinds = {DELTA: delta.beside(config, full, rule), FULL: full}
    mlp = _with_experts(config, full).mlp
    kinds |= {f"{name} experts": msgspec.structs.replace(kinds[name], mlp=mlp) for name in kinds}
    feeds = [" experts" if feed == "sparse" else "" for feed in _feeds(config)]
    types = delta.types_or(config, _places(config))
    order = [name + feed for name, feed in zip(types, feeds, strict=True)]
    return gated.of_kinds(config, kinds, order)


def _latent(config: Settings) -> AttentionConfig:
    """Describe latent attention (DeepSeek-AI 2024, DeepSeek-V3). The entries of keys that all heads
    share are the first.
    """
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


def _with_experts(config: Settings, dense: LayerConfig) -> LayerConfig:
    """Return the layer with experts in place of its MLP."""
    inner = config.whole("moe_intermediate_size")
    groups, kept = config.whole("n_group"), config.whole("topk_group")
    return gated.with_experts(
        dense.with_mlp(hidden=inner),
        config.whole("num_local_experts"),
        config.whole("num_experts_per_tok"),
        "sigmoid_of_chosen" if config.flag("norm_topk_prob", True) else "sigmoid",
        choice={"name": "groups", "groups": groups, "kept": kept},
        factor=config.number("routed_scaling_factor"),
        shared=inner * config.whole("n_shared_experts"),
    )


def _feeds(config: Settings) -> List[str]:
    """Take mlp_layer_types, or first_k_dense_replace, and return the kind of each layer's MLP."""
    first = config.integer("first_k_dense_replace", 1, least=0)
    default = ["dense" if index < first else "sparse" for index in range(config.layers)]
    feeds = config.per_layer("mlp_layer_types", default)
    other = next((name for name in feeds if name not in ("dense", "sparse")), None)
    if other is not None:
        raise config.refusal("mlp_layer_types to be dense or sparse", other, UNSUPPORTED)
    return feeds


def _places(config: Settings) -> List[str]:
    """Return the types of layers without layer_types, from lists of layers that count from 1."""
    nested = config.values.get(NESTED) or {}
    full, rules = (config.indices(f"{NESTED}.{name}", ()) for name in PLACES)
    if not all(name in nested for name in PLACES):
        return [FULL if index and index % 4 == 0 else DELTA for index in range(config.layers)]
    if config.values.get("layer_types") is None:
        if sorted([*full, *rules]) != list(range(1, config.layers + 1)):
            rule = f"each of layers 1 .. {config.layers} once in {' or '.join(PLACES)}"
            raise config.error(rule, f"{list(full)} and {list(rules)}")
    return [FULL if index + 1 in full else DELTA for index in range(config.layers)]


INPUTS = dict(zip("qkvzba", ("q", "k", "v", "g_a", "b", "f_a"), strict=True))
RULE = {
    **delta.weights(
        delta.inputs({part: f"{ATTENTION}{name}_proj" for part, name in INPUTS.items()}),
        delta.filters([f"{ATTENTION}{part}_conv1d.weight" for part in "qkv"]),
        "o_norm",
        "o_proj",
        ATTENTION,
    ),
    PROJECTION + "gates": same(ATTENTION + "g_b_proj"),
    PROJECTION + "decays": same(ATTENTION + "f_b_proj"),
    # One number for each head.
    PROJECTION + "decay.value": Rule(
        lambda kind, shape, layer: {ATTENTION + "A_log": (1, 1, layer.heads, 1)},
        lambda tensors, layer: tensors[0].exp().flatten().repeat_interleave(layer.head_size),
    ),
}
LATENT: Table = {
    PROJECTION + "query_down": same(ATTENTION + "q_a_proj"),
    PROJECTION + "query_norm": same(ATTENTION + "q_a_layernorm"),
    PROJECTION + "down": same(ATTENTION + "kv_a_proj_with_mqa"),
    PROJECTION + "norm": same(ATTENTION + "kv_a_layernorm"),
    PROJECTION + "up": keys_then_values(ATTENTION + "kv_b_proj"),
}
FEED, MLP = gated.LAYER + "mlp.", ("gate", "up", "down")
NAMES = (f"{FEED}experts.{{row}}.{name}.weight" for name in ("w1", "w3", "w2"))
EXPERTS: Table = {
    OURS + "mlp.choose.correction": whole(FEED + "gate.e_score_correction_bias"),
    **experts(FEED + "gate", *NAMES),
    **{OURS + f"mlp.shared.{name}": same(FEED + f"shared_experts.{name}_proj") for name in MLP},
}


def queries(description: StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rule for the projection of queries, whose name depends on q_lora_rank."""
    name = "q_b_proj" if config.get("q_lora_rank") else "q_proj"
    return {PROJECTION + "query_up": rotated_first(ATTENTION + name)}


FAMILY = Family(
    describe,
    {**gated.WEIGHTS, **LATENT, **RULE, **EXPERTS},
    further_weights=queries,
    renamed={"block_sparse_moe": "mlp"},
)
