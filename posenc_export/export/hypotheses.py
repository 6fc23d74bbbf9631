"""Faults found by trial. Models are made that differ from the reference in one number or rule; the
fault is the one whose model gives the outputs of the graph. Faults of descriptions are listed here,
for `compare`, and those of checkpoints in auditing/configurations.py, for audits.
"""

import contextlib
import itertools
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from posenc_export.export.expected import eager_session, full_pass
from posenc_export.models import block, parameters
from posenc_export.models.by_transformers import TransformersModel
from posenc_export.models.config import AttentionConfig
from posenc_export.models.whole_pass import encodings_in
from posenc_export.runtime.artefact.summary import spec_text

THETAS = (100.0, 1000.0, 10000.0, 100000.0, 500000.0, 1000000.0, 5000000.0)
# A fault explains a graph if the outputs of its model differ from the graph's by at most this many
# tolerances, and by this many times less than the outputs of the reference.
NEAR = 4.0
LAYOUTS = (None, "interleaved")  # None: half
Spec = dict[str, Any]
Change = Callable[[AttentionConfig], AttentionConfig]


class Hypothesis(NamedTuple):
    """A fault: its short name, and what the graph does."""

    cause: str
    words: str


def explained(
    models: Iterable[tuple[Hypothesis, Any]],
    expected: np.ndarray,
    tokens: np.ndarray,
    actual: np.ndarray,
    tolerance: float,
) -> Hypothesis | None:
    """Return the fault that explains the outputs `actual` [B,L,V] of a full pass of tokens, ids
    [B,L] or hidden states [B,L,E], or None.

    Args:
        models: faults with models that have them.
        expected: outputs of the reference, of the same shape.
        tolerance: largest error of a correct graph.
    """
    scale = float(np.abs(actual).max()) or 1.0

    def error(outputs: np.ndarray) -> float:
        return float(np.abs(outputs - actual).max(initial=0))

    most, own = NEAR * tolerance * scale, error(expected)
    if own > tolerance * scale:  # not if only shorter sequences are wrong, as with long factors
        most = min(most, own / NEAR)
    found = (hypothesis for hypothesis, model in models if error(_outputs(model, tokens)) <= most)
    return next(found, None)


def _outputs(model: Any, tokens: np.ndarray) -> np.ndarray:
    if isinstance(model, TransformersModel):
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(tokens)))
    return full_pass(eager_session(model, tokens.shape[1]), tokens, 0, None)


def with_faults(model: Any) -> Iterator[tuple[Hypothesis, Any]]:
    """Yield faults that a description of the same weights may have, with models that have them:
    other encodings, other numbers of heads, and other factors of scores.
    """
    for fault, change in _changes(model.config.attentions[0]):
        with contextlib.suppress(ValueError):  # raised for a description that no model has
            other = changed(model, change)
            if other is not None:
                yield fault, other


def _changes(own: AttentionConfig) -> Iterator[tuple[Hypothesis, Change]]:
    """Yield faults, and functions that return an attention with the fault."""
    rotations: dict[str, Spec] = {"rope": {"name": "rope"}}
    rotations |= {spec["name"]: spec for spec in own.encodings if spec["name"].startswith("rope")}
    thetas = [*(spec.get("theta") for spec in rotations.values()), *THETAS]
    step = 2 * max(1, own.head_size // 32)  # sizes of rotations are even
    values = itertools.chain(
        itertools.product([None, own.head_size // 2, own.head_size // 4], thetas, LAYOUTS),
        itertools.product(range(step, own.head_size, step), thetas[: len(rotations)], LAYOUTS),
    )
    specs: list[Spec] = [{"name": "nope"}, {"name": "alibi"}]
    for (rotary, theta, layout), spec in itertools.product(values, rotations.values()):
        spec = {**spec, "rotary": rotary, "theta": theta, "layout": layout}
        specs.append({key: value for key, value in spec.items() if value is not None})
    for spec in specs:
        words = f"the encoding is {spec_text(spec)}"
        yield Hypothesis("encoding", words), _with(encodings=(spec,))
    for size in range(1, own.heads * own.head_size + 1):
        heads, rest = divmod(own.heads * own.head_size, size)
        if not rest:
            kv_heads = own.kv_heads * own.head_size // size
            sizes = _with(heads=heads, kv_heads=kv_heads, head_size=size)
            yield Hypothesis("heads", f"the number of heads is {heads}"), sizes
    for factor in factors_of(own.head_size):
        words = f"scores are scaled by {factor:.6g} times the factor of the reference"
        yield Hypothesis("scale", words), _scaled(factor)


def factors_of(size: int) -> Iterator[float]:
    """Yield wrong factors of scores for a head size: those of a factor that is left out or applied
    twice, and of other head sizes.
    """
    factors = [2.0, 0.5, 2**0.5, 0.5**0.5, 4.0, 0.25]
    factors += [size**0.5, size**-0.5, (size / 64) ** 0.5, (size / 128) ** 0.5]
    yield from (factor for factor in dict.fromkeys(factors) if factor != 1)


def changed(model: Any, change: Change) -> Any:
    """Return a block or stack with the same weights and changed attentions. None if the change has
    no effect, or needs weights of other shapes.
    """
    config: Any = model.config
    if isinstance(model, block.AttentionBlock):
        described = replace(config, attention=change(config.attention))
    else:
        changes = {name: change(layer.attention) for name, layer in config.layers.items()}
        layers = {n: replace(config.layers[n], attention=a) for n, a in changes.items()}
        described = replace(config, layers=layers)
    if described == config:
        return None
    with torch.device("meta"):
        other: Any = type(model)(described)
    weights, places = dict(model.named_parameters()), parameters.slots(other)
    for name, parameter in list(other.named_parameters()):
        if name not in weights or weights[name].shape != parameter.shape:
            return None
        parameters.fill(places[id(parameter)], weights[name])
    for encoding in encodings_in(other):
        encoding.prepare()
    return other.eval()


def _scaled(factor: float) -> Change:
    def change(attention: AttentionConfig) -> AttentionConfig:
        own = attention.head_size**-0.5 if attention.scale is None else attention.scale
        return replace(attention, scale=own * factor)

    return change


def _with(**fields: Any) -> Change:
    return lambda attention: replace(attention, **fields)
