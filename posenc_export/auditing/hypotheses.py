"""Faults by trial: models that differ from the reference in one number or rule, as exporters get
them wrong. A fault is named if such a model gives the outputs of the graph.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch
from msgspec.structs import replace

from posenc_export.auditing.exact import Exact
from posenc_export.export.expected import eager_session, full_pass
from posenc_export.models.attention_config import AttentionConfig
from posenc_export.models.block import AttentionBlock
from posenc_export.models.parameters import fill, slots
from posenc_export.models.stack import Stack

THETAS = (100.0, 1000.0, 10000.0, 100000.0, 500000.0, 1000000.0, 5000000.0)
NEAR = 4.0  # a model is the graph's if their outputs differ by at most this many tolerances
# Rotations that scale angles, whose parameters a plain rotation lacks.
SCALED = ("rope_linear", "rope_ntk", "rope_yarn", "rope_llama3", "rope_longrope", "rope_dynamic")
Change = Callable[[AttentionConfig], Optional[AttentionConfig]]


@dataclass(frozen=True)
class Hypothesis:
    """A fault.

    Args:
        cause: its short name.
        words: what the graph does, for a sentence.
        change: returns the attention with the fault; None if the attention cannot have it.
        lengths: factors of LongRoPE, in place of a change.
    """

    cause: str
    words: str
    change: Change = lambda attention: None
    lengths: Optional[str] = None


def explained(
    reference: Exact, tokens: np.ndarray, actual: np.ndarray, tolerance: float
) -> Optional[Hypothesis]:
    """Return the fault that explains the outputs of a full pass from position 0, or None.

    Args:
        tokens: [B,L] ids, or hidden states [B,L,E].
        actual: outputs of the graph [B,L,V].
        tolerance: largest error of a right graph.
    """
    scale = float(np.abs(actual).max()) or 1.0

    def error(model: Any) -> float:
        session = eager_session(model, tokens.shape[1])
        outputs = full_pass(session, tokens, 0, None)
        return float(np.abs(outputs - actual).max()) / scale

    base = reference.model
    if reference.facts.whole:
        beyond = tokens.shape[1] > reference.facts.whole
        base = reference.made("long" if beyond else "short")
    for hypothesis in hypotheses(base):
        if hypothesis.lengths:
            model = reference.made(hypothesis.lengths)
        else:
            model = changed(base, hypothesis.change)
        if model is not None and tokens.shape[1] <= model.config.max_positions:
            if error(model) <= NEAR * tolerance:
                return hypothesis
    return None


def hypotheses(model: Any) -> Iterator[Hypothesis]:
    """Yield the faults that a model can have."""
    attentions = _config_of(model).attentions
    sizes = {a.sees["size"] for a in attentions if "size" in a.sees}
    kinds = " and ".join(sorted({a.sees["name"] for a in attentions if "size" in a.sees}))
    name = f"the {kinds} of {' and '.join(map(str, sorted(sizes)))} keys"
    yield Hypothesis("window ignored", f"{name} is ignored", _unlimited)
    for by, words in ((1, "one key too many"), (-1, "one key too few")):
        yield Hypothesis("window off by one", f"{name} has {words}", _resized(by))
    own = {spec["theta"] for a in attentions for spec in a.encodings if "theta" in spec}
    of_own = " and ".join(f"{theta:g}" for theta in sorted(own))
    for theta in THETAS:
        words = f"theta of the rotation is {theta:g} and not {of_own}"
        yield Hypothesis("theta", words, _in_encodings(_given("theta", theta)))
    yield Hypothesis(
        "layout",
        "the rotation pairs other numbers of a head: half and interleaved are exchanged",
        _in_encodings(_other_layout),
    )
    yield Hypothesis("rotary size", "all numbers of a head are rotated", _in_encodings(_whole))
    yield Hypothesis(
        "scaling of angles ignored",
        "the rotation is that of a model without scaled angles",
        _in_encodings(_unscaled),
    )
    words = "the ends of YaRN's band are rounded otherwise (truncate)"
    yield Hypothesis("band of YaRN", words, _in_encodings(_other_band))
    words = "the attention factor of scaled angles is 1"
    yield Hypothesis("attention factor", words, _in_encodings(_no_factor))
    for lengths in ("long", "short"):
        words = f"the rotation has the {lengths} factors at every length"
        if reference_has_lengths(attentions):
            yield Hypothesis(f"{lengths} factors always", words, lengths=lengths)
    yield Hypothesis("encoding dropped", "no position encoding is applied", _bare)
    yield Hypothesis("sinks dropped", "sinks are not in the softmax", _without("sinks", False))
    yield Hypothesis("softcap dropped", "scores are not capped", _without("softcap", None))
    words = "queries and keys are not normalized"
    yield Hypothesis("head norm dropped", words, _without("head_norm", None))
    for factor in _scales(attentions):
        words = f"scores are scaled by {factor:.6g} times the factor of the reference"
        yield Hypothesis("scale", words, _scaled(factor))


def reference_has_lengths(attentions: Tuple[AttentionConfig, ...]) -> bool:
    """Whether a model has LongRoPE."""
    return any(s["name"] == "rope_longrope" for a in attentions for s in a.encodings)


def _scales(attentions: Tuple[AttentionConfig, ...]) -> List[float]:
    """Return factors of scores that exporters confuse: 1, 1/D, those of other head sizes."""
    sizes = {a.head_size for a in attentions}
    factors = [2.0, 0.5, 2**0.5, 0.5**0.5, 4.0, 0.25]
    for size in sizes:
        factors += [size**0.5, size**-0.5]
        factors += [(size / 64) ** 0.5, (size / 128) ** 0.5]
    return [factor for factor in dict.fromkeys(factors) if factor != 1]


def changed(model: Any, change: Change) -> Any:
    """Return a model with the same weights whose attentions are changed; None if none changes, or
    if the change is not that of a model.
    """
    config = _config_of(model)
    if isinstance(model, AttentionBlock):
        attention = change(config.attention)
        described = attention and replace(config, attention=attention)
    elif isinstance(model, Stack):
        layers: Dict[str, Any] = {}
        for name, layer in config.layers.items():
            attention = change(layer.attention)
            layers[name] = replace(layer, attention=attention) if attention else layer
        described = replace(config, layers=layers) if layers != config.layers else None
    else:
        return None
    if described is None:
        return None
    with torch.device("meta"):
        other: Any = type(model)(described)
    weights, places = dict(model.named_parameters()), slots(other)
    for name, parameter in list(other.named_parameters()):
        if name not in weights or weights[name].shape != parameter.shape:
            return None
        fill(places[id(parameter)], weights[name])
    for encoding in {other.token_encoding, *(part.encoding for part in other.attentions())}:
        encoding.prepare()
    return other.eval()


def _config_of(model: Any) -> Any:
    return model.config


def _unlimited(attention: AttentionConfig) -> Optional[AttentionConfig]:
    limited = attention.sees["name"] in ("window", "chunk")
    return replace(attention, sees={"name": "causal"}) if limited else None


def _resized(by: int) -> Change:
    def change(attention: AttentionConfig) -> Optional[AttentionConfig]:
        size = attention.sees.get("size", 0) + by
        limited = "size" in attention.sees and size > 0
        return replace(attention, sees={**attention.sees, "size": size}) if limited else None

    return change


def _in_encodings(change: Callable[[Dict[str, Any]], Dict[str, Any]]) -> Change:
    def of_attention(attention: AttentionConfig) -> Optional[AttentionConfig]:
        encodings = tuple(change(spec) for spec in attention.encodings)
        different = encodings != attention.encodings
        return replace(attention, encodings=encodings) if different else None

    return of_attention


def _given(key: str, value: Any) -> Callable[[Dict[str, Any]], Dict[str, Any]]:
    return lambda spec: {**spec, key: value} if key in spec else spec


def _other_layout(spec: Dict[str, Any]) -> Dict[str, Any]:
    if not spec["name"].startswith("rope"):
        return spec
    layout = "half" if spec.get("layout") == "interleaved" else "interleaved"
    return {**spec, "layout": layout}


def _whole(spec: Dict[str, Any]) -> Dict[str, Any]:
    return {key: value for key, value in spec.items() if key != "rotary"}


def _unscaled(spec: Dict[str, Any]) -> Dict[str, Any]:
    if spec["name"] not in SCALED:
        return spec
    kept = ("theta", "layout", "rotary")
    return {"name": "rope", **{key: value for key, value in spec.items() if key in kept}}


def _other_band(spec: Dict[str, Any]) -> Dict[str, Any]:
    truncated = {"truncate": "yes" if spec.get("truncate") == "no" else "no"}
    return {**spec, **truncated} if spec["name"] == "rope_yarn" else spec


def _no_factor(spec: Dict[str, Any]) -> Dict[str, Any]:
    scaled = spec["name"] in ("rope_yarn", "rope_longrope")
    return {**spec, "attention_factor": 1.0} if scaled else spec


def _bare(attention: AttentionConfig) -> Optional[AttentionConfig]:
    return replace(attention, encodings=()) if attention.encodings else None


def _without(field: str, value: Any) -> Change:
    def change(attention: AttentionConfig) -> Optional[AttentionConfig]:
        present = getattr(attention, field) not in (value, False, None)
        return replace(attention, **{field: value}) if present else None

    return change


def _scaled(factor: float) -> Change:
    def change(attention: AttentionConfig) -> AttentionConfig:
        own = attention.head_size**-0.5 if attention.scale is None else attention.scale
        return replace(attention, scale=own * factor)

    return change
