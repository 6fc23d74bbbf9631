"""What a family of checkpoints is, and the classes that its file describes a model with."""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Sequence

from posenc_export.models.config import (
    AttentionConfig,
    HeadConfig,
    LayerConfig,
    Named,
    StackConfig,
    TokensConfig,
)
from posenc_export.models.families.shared.rules import Table
from posenc_export.models.families.shared.settings import Settings
from posenc_export.models.families.shared.typed_keys import ACTIVATIONS, UNSUPPORTED
from posenc_export.models.parts import PARTS

__all__ = ["ACTIVATIONS", "UNSUPPORTED", "Family", "Settings", "layer_of", "stack"]
__all__ += ["AttentionConfig", "HeadConfig", "LayerConfig", "Named"]
__all__ += ["StackConfig", "TokensConfig"]


def stack(
    config: Settings,
    layers: Dict[str, LayerConfig],
    order: Sequence[str],
    tokens: TokensConfig,
    **parts: Any,
) -> StackConfig:
    """Describe a model with the width and range of a config; `parts` are further fields."""
    sizes: Dict[str, Any] = {"width": config.width, "max_positions": config.max_positions}
    return StackConfig(**sizes, tokens=tokens, layers=layers, order=tuple(order), **parts)


def layer_of(
    attention: AttentionConfig, mlp: Named, norm: Named, residual: str = "pre"
) -> LayerConfig:
    """Describe a layer in which all norms are alike. residual: key of parts.PARTS["residual"]."""
    norms = (norm,) * len(PARTS["residual"][residual].NORMS)
    return LayerConfig(residual={"name": residual}, norms=norms, attention=attention, mlp=mlp)


@dataclass(frozen=True)
class Family:
    """A family of checkpoints."""

    # Converts the keys of config.json to the description of the model.
    describe: Callable[[Settings], StackConfig]
    # Rules that form our parameters, by name of the parameter or of its module.
    weights: Table
    # Prefix of tensor names that transformers' models with a head have and its base models do not
    # have.
    base: str = "model."
