"""Kimi Linear (Kimi Team 2025): gated delta rules with a decay for each entry of a key, latent
attention without positions, experts from the best groups.
"""

from typing import List

import msgspec

from posenc_export.models.config import AttentionConfig
from posenc_export.models.families import deepseek_v3
from posenc_export.models.families.shared import delta, gated
from posenc_export.models.families.shared.delta import ATTENTION, DELTA, FULL, PROJECTION
from posenc_export.models.families.shared.family import UNSUPPORTED, Family, Settings, StackConfig
from posenc_export.models.families.shared.rules import Rule, experts, same

# Keys of published configs that transformers does not read, with the values of published models.
FIXED = {
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "mla_use_nope": True,
    "use_grouped_topk": True,
}
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
    full = gated.layer(config, deepseek_v3.latent(config))
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
    mlp = deepseek_v3.with_experts(config, full, "num_local_experts").mlp
    kinds |= {f"{name} experts": msgspec.structs.replace(kinds[name], mlp=mlp) for name in kinds}
    feeds = [" experts" if feed == "sparse" else "" for feed in _feeds(config)]
    types = delta.types_or(config, _places(config))
    order = [name + feed for name, feed in zip(types, feeds, strict=True)]
    return gated.of_kinds(config, kinds, order)


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
FEED = deepseek_v3.FEED
NAMES = (f"{FEED}experts.{{row}}.{name}.weight" for name in ("w1", "w3", "w2"))
EXPERTS = {**deepseek_v3.EXPERTS, **experts(FEED + "gate", *NAMES)}
FAMILY = Family(
    describe,
    {**gated.WEIGHTS, **deepseek_v3.LATENT, **RULE, **EXPERTS},
    further_weights=deepseek_v3.queries,
    renamed={"block_sparse_moe": "mlp"},
)
