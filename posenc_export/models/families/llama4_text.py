"""The text model of Llama 4 (Meta 2025): chunked attention in layers with rotation, a
temperature in layers without, experts with a shared expert.
"""

from typing import List

import msgspec

from posenc_export.models.families.shared.family import (
    UNSUPPORTED,
    Family,
    LayerConfig,
    Settings,
    StackConfig,
)
from posenc_export.models.families.shared.gated import (
    LAYER,
    WEIGHTS,
    attention,
    decoder,
    layer,
    with_attention,
    with_experts,
)
from posenc_export.models.families.shared.rules import OURS, Table, half_of_columns, same, whole


def _rotated(config: Settings) -> List[bool]:
    """Return whether each layer has rotation, from no_rope_layers (1 for rotation) or, if that
    is missing or empty, from no_rope_layer_interval.
    """
    interval = config.whole("no_rope_layer_interval", 4)
    return [
        bool(flag)
        for flag in config.per_layer(
            "no_rope_layers",
            [(index + 1) % interval for index in range(config.layers)],
            or_empty=True,
        )
    ]


def _attention(config: Settings) -> List[LayerConfig]:
    """Describe each layer, with an MLP that the caller replaces."""
    rotation = config.rotation(theta=500000.0, layout="interleaved")
    rotated = _rotated(config)
    size = config.window("attention_chunk_size")
    bias = config.flag("attention_bias", False)
    kind = layer(config, attention(config, bias, bias))
    period, slope = config.whole("floor_scale", 8192), config.number("attn_scale", 0.1)
    plain = (
        [{"name": "logn", "form": "steps", "temperature": slope, "period": period}]
        if config.flag("attn_temperature_tuning", True)
        else []
    )
    norm = (
        {"name": "head", "norm": {**kind.norms[0], "weight": False}}
        if config.flag("use_qk_norm", True)
        else None
    )
    if norm and rotation["name"] in (
        "rope_yarn",
        "rope_longrope",
    ):  # transformers normalises after rotation, which differs if rotation changes lengths
        rule = "expected a rope_type that keeps the lengths of queries and keys with use_qk_norm"
        raise ValueError(
            f"llama4_text: {rule}, got {rotation['name'].removeprefix('rope_')}; {UNSUPPORTED}"
        )
    types = config.per_layer(
        "layer_types", ["chunked_attention" if flag else "full_attention" for flag in rotated]
    )
    if not set(types) <= (
        {"full_attention"} if size is None else {"full_attention", "chunked_attention"}
    ):
        rule = (
            "expected layer_types to be full_attention, or chunked_attention with "
            "attention_chunk_size"
        )
        raise ValueError(
            f"llama4_text: {rule}, got {', '.join(types)} and {size}; correct config.json"
        )
    visible = {
        "full_attention": {"name": "causal"},
        "chunked_attention": {"name": "chunk", "size": size},
    }
    return [
        with_attention(
            kind,
            sees=visible[name],
            encodings=(rotation,) if flag else tuple(plain),
            head_norm=norm if flag else None,
        )
        for name, flag in zip(types, rotated, strict=True)
    ]


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Without moe_layers, every interleave_moe_layer_step-th layer has
    experts. Weights multiply the inputs of experts.
    """
    config.needs("num_key_value_heads", "head_dim", "attention_chunk_size")
    config.only("for_llm_compressor", False, False)
    step = config.whole("interleave_moe_layer_step", 1)
    experts_at = config.indices("moe_layers", range(step - 1, config.layers, step))
    layers = _attention(config)
    experts, chosen, dense = (
        config.whole(key)
        for key in ("num_local_experts", "num_experts_per_tok", "intermediate_size_mlp")
    )
    kinds, order = {}, []
    for index, kind in enumerate(layers):
        if index in experts_at:
            kind = with_experts(
                kind, experts, chosen, "sigmoid", on="input", shared=kind.mlp["hidden"]
            )
        else:
            kind = msgspec.structs.replace(kind, mlp={**kind.mlp, "hidden": dense})
        encoding = "".join(spec["name"] for spec in kind.attention.encodings) or "nope"
        order.append(f"{kind.attention.sees['name']} {encoding} {kind.mlp['name']}")
        kinds[order[-1]] = kind
    return decoder(config, kinds, order)


FEED = LAYER + "feed_forward."
EXPERTS: Table = {
    **{OURS + f"mlp.{name}": same(FEED + f"{name}_proj") for name in ("gate", "up", "down")},
    **{
        OURS + f"mlp.shared.{name}": same(FEED + f"shared_expert.{name}_proj")
        for name in ("gate", "up", "down")
    },
    OURS + "mlp.router": same(FEED + "router"),
    OURS + "mlp.gates": half_of_columns(FEED + "experts.gate_up_proj", 0),
    OURS + "mlp.ups": half_of_columns(FEED + "experts.gate_up_proj", 1),
    OURS + "mlp.downs": whole(FEED + "experts.down_proj"),
}
FAMILY = Family(describe, {**WEIGHTS, **EXPERTS})
