"""Faults by trial in models of transformers: copies with another configuration, as exporters get
it wrong. export/hypotheses.py tries those of descriptions.
"""

from typing import Any, Callable, Iterator

import torch

from posenc_export.export.hypotheses import THETAS, Hypothesis, factors_of
from posenc_export.models.by_transformers import TransformersModel, limit
from posenc_export.models.parameters import sharing_weights

EVERYTHING = 1 << 30  # keys of a window that hides none


def with_faults(model: TransformersModel) -> Iterator[tuple[Hypothesis, TransformersModel]]:
    """Yield the faults that a model of transformers can have, with models that have them, which
    share its weights.
    """
    config = model.model.config.get_text_config()
    window = limit(config, "sliding_window")
    if type(window) is int and window > 1:
        name = f"the window of {window} keys"
        for size, cause, words in (
            (EVERYTHING, "window ignored", f"{name} is ignored"),
            (window + 1, "window off by one", f"{name} has one key too many"),
            (window - 1, "window off by one", f"{name} has one key too few"),
        ):
            yield Hypothesis(cause, words), _changed(model, _windowed, sliding_window=size)
    own = getattr(config, "rope_parameters", None) or {}
    if not model.trained and "rope_theta" in own:  # one rotation, not of LongRoPE
        for theta in sorted({*THETAS} - {own["rope_theta"]}):
            words = f"theta of the rotation is {theta:g} and not {own['rope_theta']:g}"
            other = {**own, "rope_theta": theta}
            yield Hypothesis("theta", words), _changed(model, _rotated, rope_parameters=other)
        if own.get("rope_type", "default") != "default":
            fault = Hypothesis("scaling of angles ignored", "angles of the rotation are not scaled")
            other = {**own, "rope_type": "default"}
            yield fault, _changed(model, _rotated, rope_parameters=other)
        fault = Hypothesis("encoding dropped", "no position encoding is applied")
        yield fault, _changed(model, _unrotated)
    scaled = any(_scales(part) for part in model.modules())
    for factor in factors_of(getattr(config, "head_dim", None) or 64) if scaled else ():
        words = f"scores are scaled by {factor:.6g} times the factor of the reference"
        yield Hypothesis("scale", words), _changed(model, _scaled(factor))


def _changed(
    model: TransformersModel, change: Callable[[Any, Any], None], **values: Any
) -> TransformersModel:
    """Return a copy that shares all parameters, with these values in its configuration. change: of
    each layer, given the layer and this configuration.
    """
    other = sharing_weights(model)
    config = other.model.config.get_text_config()
    for key, value in values.items():
        setattr(config, key, value)
    with torch.no_grad():
        for part in other.model.modules():
            change(part, config)
    return other


def _windowed(part: Any, config: Any) -> None:
    if getattr(part, "sliding_window", None):
        part.sliding_window = config.sliding_window


def _rotated(part: Any, config: Any) -> None:
    if hasattr(part, "inv_freq"):
        part.__init__(config)


def _unrotated(part: Any, config: Any) -> None:
    if hasattr(part, "inv_freq"):
        part.inv_freq.zero_()


def _scaled(factor: float) -> Callable[[Any, Any], None]:
    def change(part: Any, config: Any) -> None:
        if _scales(part):
            part.scaling *= factor

    return change


def _scales(part: Any) -> bool:
    return isinstance(getattr(part, "scaling", None), float)
