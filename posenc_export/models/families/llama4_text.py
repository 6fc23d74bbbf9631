"""The text model of Llama 4 (Meta 2025): chunks with rotation, others with a temperature."""

from typing import Any, Dict, List

from posenc_export.models.config import LayerConfig, StackConfig
from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import UNSUPPORTED, Family, Settings
from posenc_export.models.families.shared.rules import OURS, Table, half_of_columns, same, whole


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Weights multiply the inputs of experts."""
    config.needs("num_key_value_heads", "head_dim", "attention_chunk_size")
    config.fixed({"for_llm_compressor": False})
    step = config.whole("interleave_moe_layer_step", 1)
    experts_at = config.indices("moe_layers", range(step - 1, config.layers, step))
    layers, dense = _layers(config), config.whole("intermediate_size_mlp")
    count, chosen = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
    kinds, order = {}, []
    for index, kind in enumerate(layers):
        if index in experts_at:
            parts = {"on": "input", "shared": kind.mlp["hidden"]}
            kind = gated.with_experts(kind, count, chosen, "sigmoid", **parts)
        else:
            kind = kind.with_mlp(hidden=dense)
        encoding = "".join(spec["name"] for spec in kind.attention.encodings) or "nope"
        order.append(f"{kind.attention.sees['name']} {encoding} {kind.mlp['name']}")
        kinds[order[-1]] = kind
    return gated.decoder(config, (kinds, order))


def _layers(config: Settings) -> List[LayerConfig]:
    """Describe each layer, with an MLP that the caller replaces."""
    rotation = config.rotation(theta=500000.0, layout="interleaved")
    rotated, bias = _rotated(config), config.flag("attention_bias", False)
    size = config.window("attention_chunk_size")
    kind = gated.layer(config, gated.attention(config, bias, bias))
    turned = kind.with_attention(encodings=(rotation,))
    if config.flag("use_qk_norm", True):
        turned = turned.with_attention(head_norm=_head_norm(config, kind, rotation["name"]))
    period, slope = config.whole("floor_scale", 8192), config.number("attn_scale", 0.1)
    if config.flag("attn_temperature_tuning", True):
        scaled = {"name": "logn", "form": "steps", "temperature": slope, "period": period}
        kind = kind.with_attention(encodings=(scaled,))
    visible: Dict[str, Any] = {"full_attention": {"name": "causal"}}
    if size is not None:
        visible["chunked_attention"] = {"name": "chunk", "size": size}
    default = ["chunked_attention" if flag else "full_attention" for flag in rotated]
    types = config.per_layer("layer_types", default)
    if not set(types) <= set(visible):
        rule = "layer_types to be full_attention, or chunked_attention with attention_chunk_size"
        raise config.error(rule, f"{', '.join(types)} and {size}")
    kinds = [turned if flag else kind for flag in rotated]
    return [of.with_attention(sees=visible[name]) for name, of in zip(types, kinds, strict=True)]


def _rotated(config: Settings) -> List[bool]:
    """Return whether each layer has rotation: no_rope_layers, or no_rope_layer_interval."""
    interval = config.whole("no_rope_layer_interval", 4)
    default = [(index + 1) % interval for index in range(config.layers)]
    return [bool(flag) for flag in config.per_layer("no_rope_layers", default, or_empty=True)]


def _head_norm(config: Settings, kind: LayerConfig, rotation: str) -> Dict[str, Any]:
    # Transformers normalises after rotation, which differs if rotation changes lengths.
    if rotation in ("rope_yarn", "rope_longrope"):
        rule = "a rope_type that keeps the lengths of queries and keys with use_qk_norm"
        raise config.error(rule, rotation.removeprefix("rope_"), UNSUPPORTED)
    return {"name": "head", "norm": {**kind.norms[0], "weight": False}}


FEED = gated.LAYER + "feed_forward."
MLP = ("gate", "up", "down")
EXPERTS: Table = {
    **{OURS + f"mlp.{name}": same(FEED + f"{name}_proj") for name in MLP},
    **{OURS + f"mlp.shared.{name}": same(FEED + f"shared_expert.{name}_proj") for name in MLP},
    OURS + "mlp.router": same(FEED + "router"),
    OURS + "mlp.gates": half_of_columns(FEED + "experts.gate_up_proj", 0),
    OURS + "mlp.ups": half_of_columns(FEED + "experts.gate_up_proj", 1),
    OURS + "mlp.downs": whole(FEED + "experts.down_proj"),
}
FAMILY = Family(describe, {**gated.WEIGHTS, **EXPERTS})
