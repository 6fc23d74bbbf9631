"""Faults by trial in models of transformers: copies with another configuration, as exporters get
it wrong. Compare export/hypotheses.py, which changes descriptions.
"""

import copy
from typing import Any, Callable, Dict, Iterator, Tuple

import torch

from posenc_export.export.hypotheses import THETAS, Hypothesis, factors_of
from posenc_export.models.by_transformers import Published, limit

Change = Callable[[Any, Any], None]  # of a layer, and of the configuration
EVERYTHING = 1 << 30  # keys of a window that hides none


def with_faults(model: Published) -> Iterator[Tuple[Hypothesis, Published]]:
    """Yield the faults that a model of transformers can have, with models that have them, which
    share its weights.
    """
    config = model.model.config.get_text_config()
    window = limit(config, "sliding_window")
    if type(window) is int:
        name = f"the window of {window} keys"
        for size, cause, words in (
            (EVERYTHING, "window ignored", f"{name} is ignored"),
            (window + 1, "window off by one", f"{name} has one key too many"),
            (window - 1, "window off by one", f"{name} has one key too few"),
        ):
            yield Hypothesis(cause, words), _changed(model, _window(size))
    own = getattr(config, "rope_parameters", None) or {}
    if not model.trained and "rope_theta" in own:
        for theta in sorted({*THETAS} - {own["rope_theta"]}):
            words = f"theta of the rotation is {theta:g} and not {own['rope_theta']:g}"
            yield Hypothesis("theta", words), _changed(model, _rotation({"rope_theta": theta}))
        if own.get("rope_type", "default") != "default":
            words, plain = "angles of the rotation are not scaled", {"rope_type": "default"}
            yield Hypothesis("scaling of angles ignored", words), _changed(model, _rotation(plain))
        yield (
            Hypothesis("encoding dropped", "no position encoding is applied"),
            _changed(model, _unrotated),
        )
    scaled = any(_scales(part) for part in model.modules())
    for factor in factors_of(getattr(config, "head_dim", None) or 64) if scaled else ():
        words = f"scores are scaled by {factor:.6g} times the factor of the reference"
        yield Hypothesis("scale", words), _changed(model, _scaled(factor))


def _changed(model: Published, change: Change) -> Published:
    """Return a copy that shares all parameters, with each of its layers changed."""
    weights: Dict[int, Any] = {id(weight): weight for weight in model.parameters()}
    other = copy.deepcopy(model, weights)
    config = other.model.config.get_text_config()
    with torch.no_grad():
        for part in other.model.modules():
            change(part, config)
    return other


def _window(size: int) -> Change:
    def change(part: Any, config: Any) -> None:
        config.sliding_window = size
        if getattr(part, "sliding_window", None):
            part.sliding_window = size

    return change


def _rotation(keys: Dict[str, Any]) -> Change:
    def change(part: Any, config: Any) -> None:
        config.rope_parameters = {**config.rope_parameters, **keys}
        if hasattr(part, "inv_freq"):
            part.__init__(config)

    return change


def _unrotated(part: Any, config: Any) -> None:
    if hasattr(part, "inv_freq"):
        part.inv_freq.zero_()


def _scaled(factor: float) -> Change:
    def change(part: Any, config: Any) -> None:
        if _scales(part):
            part.scaling *= factor

    return change


def _scales(part: Any) -> bool:
    return isinstance(getattr(part, "scaling", None), float)
