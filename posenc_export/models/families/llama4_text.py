"""Llama 4, its text model (Meta 2025): chunks of positions in layers that turn, a temperature in those that do not, a shared expert beside one of many."""

from typing import List

import msgspec

from posenc_export.models.config import LayerConfig, StackConfig
from posenc_export.models.families import Family
from posenc_export.models.families.gated import LAYER, OURS, WEIGHTS, attention, decoder, layer, with_attention, with_experts
from posenc_export.models.families.rules import Half, Same, Table, Whole
from posenc_export.models.families.settings import Settings


def _turned(config: Settings) -> List[bool]:
    """Whether each layer turns: no_rope_layers has a 1 where it does; where it is missing or empty, no_rope_layer_interval counts."""
    interval = config.whole("no_rope_layer_interval", 4)
    return [bool(turns) for turns in config.per_layer("no_rope_layers", [(index + 1) % interval for index in range(config.layers)], or_empty=True)]


def _attention(config: Settings) -> List[LayerConfig]:
    """The layer of each index, but for its MLP."""
    rotation, turned, size = config.rotation(theta=500000.0, layout="interleaved"), _turned(config), config.window("attention_chunk_size")
    bias = config.flag("attention_bias", False)
    kind = layer(config, attention(config, bias, bias))
    period, slope = config.whole("floor_scale", 8192), config.number("attn_scale", 0.1)
    plain = [{"name": "logn", "form": "steps", "temperature": slope, "period": period}] if config.flag("attn_temperature_tuning", True) else []
    norm = {"name": "head", "norm": {**kind.norms[0], "weight": False}} if config.flag("use_qk_norm", True) else None
    if norm and rotation["name"] in ("rope_yarn", "rope_longrope"):  # the norm stands behind the rotation there, which then has another length
        raise ValueError(f"llama4_text: rotations beside use_qk_norm keep lengths, got {rotation['name'].removeprefix('rope_')}; nothing else of it can be exported yet")
    types = config.per_layer("layer_types", ["chunked_attention" if turns else "full_attention" for turns in turned])
    if not set(types) <= ({"full_attention"} if size is None else {"full_attention", "chunked_attention"}):
        raise ValueError(f"llama4_text: layer_types are full_attention, or chunked_attention beside attention_chunk_size, got {', '.join(types)} and {size}")
    sights = {"full_attention": {"name": "causal"}, "chunked_attention": {"name": "chunk", "size": size}}
    return [
        with_attention(kind, sees=sights[name], encodings=(rotation,) if turns else tuple(plain), head_norm=norm if turns else None)
        for name, turns in zip(types, turned, strict=True)
    ]


def describe(config: Settings) -> StackConfig:
    """Every interleave_moe_layer_step-th layer has experts where moe_layers does not say which. Weights multiply what experts read."""
    for key in ("num_key_value_heads", "head_dim", "attention_chunk_size"):
        config.needs(key)
    config.only("for_llm_compressor", False, False)
    step, given = config.whole("interleave_moe_layer_step", 1), config.take("moe_layers", None)
    experts_at = range(step - 1, config.layers, step) if given is None else given
    layers = _attention(config)
    experts, chosen, dense = (config.whole(key) for key in ("num_local_experts", "num_experts_per_tok", "intermediate_size_mlp"))
    kinds, order = {}, []
    for index, kind in enumerate(layers):
        if index in experts_at:
            kind = with_experts(kind, experts, chosen, "sigmoid", on="input", shared=kind.mlp["hidden"])
        else:
            kind = msgspec.structs.replace(kind, mlp={**kind.mlp, "hidden": dense})
        encoding = "".join(spec["name"] for spec in kind.attention.encodings) or "nope"
        order.append(f"{kind.attention.sees['name']} {encoding} {kind.mlp['name']}")
        kinds[order[-1]] = kind
    return decoder(config, kinds, order)


FEED = LAYER + "feed_forward."
EXPERTS: Table = {
    **{OURS + f"mlp.{name}": Same(FEED + f"{name}_proj") for name in ("gate", "up", "down")},
    **{OURS + f"mlp.shared.{name}": Same(FEED + f"shared_expert.{name}_proj") for name in ("gate", "up", "down")},
    OURS + "mlp.router": Same(FEED + "router"),
    OURS + "mlp.gates": Half(FEED + "experts.gate_up_proj", 0),
    OURS + "mlp.ups": Half(FEED + "experts.gate_up_proj", 1),
    OURS + "mlp.downs": Whole(FEED + "experts.down_proj"),
}
FAMILY = Family(describe, {**WEIGHTS, **EXPERTS})
