"""Decoders like GPT-2: LayerNorm, all heads with keys, no gate (Radford et al. 2019, 2.3)."""

from typing import Any, Dict, Optional

from posenc_export.models.config import AttentionConfig, Named
from posenc_export.models.families.shared.rules import OURS, QKV, Rule, grouped, same
from posenc_export.models.families.shared.settings import Settings
from posenc_export.models.families.shared.typed_keys import REQUIRED


def attention(
    config: Settings,
    bias: bool,
    kv_heads: Optional[int] = None,
    clip: Optional[float] = None,
    **parts: Any,
) -> AttentionConfig:
    """Describe attention with head size width / heads and further fields of AttentionConfig;
    encodings are set later. bias: of all projections; kv_heads: None for as many as heads; clip:
    largest absolute value of queries, keys and values.
    """
    projection = {"name": "grouped", "bias": bias, "output_bias": bias}
    projection |= {} if clip is None else {"clip": clip}
    return AttentionConfig(
        heads=config.heads,
        kv_heads=kv_heads or config.heads,
        head_size=config.width // config.heads,
        projection=projection,
        **parts,
    )


def mlp(
    config: Settings, key: str, default: Any = REQUIRED, hidden: Any = REQUIRED, bias: bool = True
) -> Named:
    """Describe an MLP without gate. key: of the activation in the config; default, hidden: the
    family's defaults of the activation and of intermediate_size.
    """
    size, activation = config.whole("intermediate_size", hidden), config.activation(key, default)
    return {"name": "plain", "hidden": size, "activation": activation, "bias": bias}


def layer_norm(config: Settings, key: str = "layer_norm_eps") -> Dict[str, Any]:
    """Describe LayerNorm with the epsilon under a key of config.json."""
    return {"name": "layer", "epsilon": config.number(key)}


def learned(config: Settings) -> Dict[str, Any]:
    """Describe learned positions, a row for each position. ValueError: another range was
    requested.
    """
    rows = config.trained_positions
    if config.max_positions != rows:
        rule = f"max_positions to be {rows}, the rows of the position table"
        remedy = "leave it out and call extend_positions(model, N)"
        raise config.refusal(rule, config.max_positions, remedy)
    return {"name": "learned"}


def megatron_layer(theirs: str) -> Dict[str, Rule]:
    """Return the rules of a layer of Megatron (BLOOM, Falcon), from a prefix of names."""
    return {
        OURS + "residual.attention_norm": same(theirs + "input_layernorm"),
        QKV: grouped(theirs + "self_attention.query_key_value"),
        OURS + "attention.projection.output": same(theirs + "self_attention.dense"),
        OURS + "residual.mlp_norm": same(theirs + "post_attention_layernorm"),
        OURS + "mlp.up": same(theirs + "mlp.dense_h_to_4h"),
        OURS + "mlp.down": same(theirs + "mlp.dense_4h_to_h"),
    }
