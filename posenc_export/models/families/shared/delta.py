"""Decoders of gated delta rules and attention with a gate (Yang et al. 2024, Gated DeltaNet)."""

from typing import Any, Dict, List, Mapping

import torch
from torch import Tensor

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import (
    UNSUPPORTED,
    AttentionConfig,
    LayerConfig,
    Named,
    Settings,
)
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import (
    OURS,
    QKV,
    Rule,
    Table,
    joined,
    one_plus,
    same,
)
from posenc_export.models.families.shared.rules import whole as whole_tensor

DELTA, FULL = "linear_attention", "full_attention"
RULE, ATTENTION = LAYER + "linear_attn.", LAYER + "self_attn."
PROJECTION = OURS + "attention.projection."
SIZES = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
PREDICTION = r"^mtp\."  # layers for multi-token prediction


def attention(config: Settings, **projection: Any) -> AttentionConfig:
    """Describe the gated delta rule with the sizes in a config. projection: parameters of it."""
    heads, kv_heads, size, value_size, kernel = (config.whole(f"linear_{name}") for name in SIZES)
    sizes = {"value_size": value_size, "kernel": kernel}
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        mechanism="gated_delta",
        projection={"name": "gated_delta", **sizes, **projection},
    )


def with_gates(config: Settings, rotation: Named) -> Dict[str, LayerConfig]:
    """Describe both layers of Qwen3.5, by layer type."""
    config.needs("num_key_value_heads", "head_dim", *(f"linear_{name}" for name in SIZES))
    bias = config.flag("attention_bias", False)
    kind = gated.head_norm(gated.layer(config, gated.attention(config, bias, bias)))
    full = kind.with_attention(
        encodings=(rotation,), projection={**kind.attention.projection, "gate": True}
    )
    rule = attention(config, epsilon=kind.norms[0]["epsilon"])
    return {DELTA: beside(config, kind, rule), FULL: full}


def beside(config: Settings, kind: LayerConfig, attention: AttentionConfig) -> LayerConfig:
    """Return a layer with a gated delta rule in place of its attention."""
    if kind.mlp["activation"] != "silu":
        rule = "hidden_act to be silu, which filters have, too"
        raise config.error(rule, kind.mlp["activation"], UNSUPPORTED)
    return LayerConfig(
        residual={"name": "pre"},
        norms=(kind.norms[0],) * 2,
        attention=attention,
        mlp=kind.mlp,
    )


def types(config: Settings) -> List[str]:
    """Take layer_types, or full_attention_interval, and return the type of each layer."""
    period = config.whole("full_attention_interval", 4)
    every = [FULL if (index + 1) % period == 0 else DELTA for index in range(config.layers)]
    names = config.per_layer("layer_types", every)
    other = next((name for name in names if name not in (DELTA, FULL)), None)
    if other is not None:
        raise config.refusal(f"layer_types to be {DELTA} or {FULL}", other, UNSUPPORTED)
    return list(names)


def by_mechanism(delta: Rule, full: Rule) -> Rule:
    """One rule for layers with a gated delta rule, and one for layers with attention."""

    def of(layer: AttentionConfig) -> Rule:
        return delta if layer.mechanism == "gated_delta" else full

    return Rule(
        lambda kind, shape, layer: of(layer).shapes(kind, shape, layer),
        lambda tensors, layer: of(layer).form(tensors, layer),
    )


def _rows(layer: AttentionConfig) -> Dict[str, int]:
    """Return the number of rows of each part of the joined input projection."""
    keys, heads = layer.kv_heads * layer.head_size, layer.heads
    values = heads * layer.projection["value_size"]
    return {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}


def inputs(modules: Mapping[str, str]) -> Rule:
    """Concatenation of separate projections, by part: qkv, z, b and a, in this order."""
    return Rule(
        lambda kind, shape, layer: {
            f"{module}.{kind}": (_rows(layer)[part], *shape[1:]) for part, module in modules.items()
        },
        lambda tensors, layer: torch.cat(tensors),
    )


def _queries_or_gates(tensor: Tensor, layer: AttentionConfig, index: int) -> Tensor:
    """Return the queries (0) or gates (1) of tensors that have both of each head in turn."""
    return tensor.unflatten(0, (layer.heads, 2, layer.head_size))[:, index].flatten(0, 1)


def _gate(module: str) -> Rule:
    return Rule(
        lambda kind, shape, layer: {f"{module}.{kind}": (2 * shape[0], *shape[1:])},
        lambda tensors, layer: _queries_or_gates(tensors[0], layer, 1),
    )


def _joined_with_gates(q: str, k: str, v: str) -> Rule:
    plain = joined(q, k, v)

    def shapes(kind: str, shape: Any, layer: AttentionConfig) -> Dict[str, Any]:
        names = plain.shapes(kind, shape, layer)
        rows, *columns = names[f"{q}.{kind}"]
        return {**names, f"{q}.{kind}": (2 * rows, *columns)}

    return Rule(
        shapes,
        lambda parts, layer: torch.cat((_queries_or_gates(parts[0], layer, 0), *parts[1:])),
    )


def weights(inputs: Rule) -> Table:
    """Rules for a gated delta rule beside attention."""
    decay = Rule(
        lambda kind, shape, layer: {RULE + "A_log": shape},
        lambda tensors, layer: tensors[0].exp(),
    )
    return {
        PROJECTION + "inputs": inputs,
        PROJECTION + "filters.value": whole_tensor(RULE + "conv1d.weight"),
        PROJECTION + "decay.value": decay,
        PROJECTION + "step.value": whole_tensor(RULE + "dt_bias"),
        PROJECTION + "norm.value": whole_tensor(RULE + "norm.weight"),
        PROJECTION + "output": by_mechanism(same(RULE + "out_proj"), same(ATTENTION + "o_proj")),
    }


# Norms that save w - 1, and attention with gates.
WITH_GATES: Table = {
    **gated.WEIGHTS,
    OURS + "residual.attention_norm": one_plus(LAYER + "input_layernorm"),
    OURS + "residual.mlp_norm": one_plus(LAYER + "post_attention_layernorm"),
    OURS + "attention.q_norm.norm": one_plus(ATTENTION + "q_norm"),
    OURS + "attention.k_norm.norm": one_plus(ATTENTION + "k_norm"),
    QKV: _joined_with_gates(*(f"{ATTENTION}{name}_proj" for name in "qkv")),
    PROJECTION + "gate": _gate(ATTENTION + "q_proj"),
    "norm": one_plus("model.norm"),
}
