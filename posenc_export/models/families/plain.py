"""What GPT-2 and the families around it have in common: LayerNorm, as many heads of keys as of queries, an MLP without a gate (Radford et al. 2019, 2.3)."""

from typing import Any, Dict, Mapping, Optional

from posenc_export.models.config import AttentionConfig, LayerConfig
from posenc_export.models.families.settings import Settings


def attention(config: Settings, bias: bool, kv_heads: Optional[int] = None, clip: Optional[float] = None, **parts: Any) -> AttentionConfig:
    """The attention that width and heads describe; encodings are given to layers.

    Args:
        bias: of all projections.
        kv_heads: as many as heads where None.
        clip: largest absolute value of queries, keys and values; no bound where None.
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
    """A layer with an MLP without a gate.

    Args:
        norm: each of its norms.
        hidden, activation, bias: of the MLP.
        residual: by its name in parts/residuals.py.
        norms: how many that has.
    """
    mlp = {"name": "plain", "hidden": hidden, "activation": activation, "bias": bias}
    return LayerConfig(residual={"name": residual}, norms=(dict(norm),) * norms, attention=attention, mlp=mlp)


def layer_norm(config: Settings, key: str) -> Dict[str, Any]:
    """LayerNorm with the epsilon that a key has."""
    return {"name": "layer", "epsilon": config.number(key)}


def learned(config: Settings) -> Dict[str, Any]:
    """A trained row for each position of the checkpoint.

    Raises:
        ValueError: another range than it was trained for.
    """
    if config.max_positions != config.trained_positions:
        rows = config.trained_positions
        raise ValueError(f"{config.family}: positions are {rows} trained rows, got max_positions={config.max_positions}; leave it out and call grown(model, N)")
    return {"name": "learned"}
