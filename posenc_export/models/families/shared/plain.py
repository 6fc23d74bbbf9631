"""Common code of decoders like GPT-2: LayerNorm, as many key heads as query heads, an MLP without gate (Radford et al. 2019, 2.3)."""

from typing import Any, Dict, Mapping, Optional

from posenc_export.models.config import AttentionConfig, LayerConfig
from posenc_export.models.families.shared.rules import Rule, joined, same
from posenc_export.models.families.shared.settings import Settings


def attention(config: Settings, bias: bool, kv_heads: Optional[int] = None, clip: Optional[float] = None, **parts: Any) -> AttentionConfig:
    """Describe attention with head size width / heads. Encodings are set later, for each layer.

    Args:
        config: keys of config.json.
        bias: whether all projections have biases.
        kv_heads: number of key and value heads; None for as many as heads.
        clip: largest absolute value of queries, keys and values; None for no bound.
        parts: further fields of AttentionConfig.
    """
    projection = {"name": "grouped", "bias": bias, "output_bias": bias}
    return AttentionConfig(
        heads=config.heads,
        kv_heads=kv_heads or config.heads,
        head_size=config.width // config.heads,
        projection=projection if clip is None else {**projection, "clip": clip},
        **parts,
    )


def layer(
    attention: AttentionConfig, norm: Mapping[str, Any], hidden: int, activation: str, bias: bool = True, residual: str = "pre", norms: int = 2
) -> LayerConfig:
    """Describe a layer with an MLP without gate.

    Args:
        attention: attention of the layer.
        norm: specification of all norms.
        hidden, activation, bias: hidden width and activation of the MLP, and whether it has biases.
        residual: key of parts.PARTS["residual"].
        norms: number of norms.
    """
    mlp = {"name": "plain", "hidden": hidden, "activation": activation, "bias": bias}
    return LayerConfig(residual={"name": residual}, norms=(dict(norm),) * norms, attention=attention, mlp=mlp)


def layer_norm(config: Settings, key: str) -> Dict[str, Any]:
    """Describe LayerNorm with the epsilon under a key of config.json."""
    return {"name": "layer", "epsilon": config.number(key)}


def learned(config: Settings) -> Dict[str, Any]:
    """Describe learned positions, with a trained row for each position of the checkpoint.

    Raises:
        ValueError: another range than that of the checkpoint was requested.
    """
    if config.max_positions != config.trained_positions:
        rows = config.trained_positions
        rule = f"expected max_positions to be {rows}, the rows of the position table"
        raise ValueError(f"{config.family}: {rule}, got {config.max_positions}; leave it out and call grown(model, N)")
    return {"name": "learned"}


def fairseq_layer(ours: str, theirs: str) -> Dict[str, Rule]:
    """Return the rules of a layer of fairseq (OPT, XGLM, Whisper); `ours` and `theirs` are the prefixes of names."""
    attention = theirs + "self_attn."
    return {
        ours + "residual.attention_norm": same(theirs + "self_attn_layer_norm"),
        ours + "attention.projection.qkv": joined(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
        ours + "attention.projection.output": same(attention + "out_proj"),
        ours + "residual.mlp_norm": same(theirs + "final_layer_norm"),
        ours + "mlp.up": same(theirs + "fc1"),
        ours + "mlp.down": same(theirs + "fc2"),
    }
