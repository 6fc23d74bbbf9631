"""Faults by trial: models that differ from one in a number or rule. A fault is named if a model
that has it gives the outputs that were found. Those of descriptions of weights are listed here, for
`compare`; those of checkpoints, for audits, in auditing/configurations.py.
"""

import contextlib
import itertools
from typing import Any, Callable, Dict, Iterable, Iterator, NamedTuple, Optional, Tuple

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
# A model is the graph's if their outputs differ by at most this many tolerances, and by this many
# times less than those of a reference that differs.
NEAR = 4.0
LAYOUTS = (None, "interleaved")  # None: half
Spec = Dict[str, Any]
Change = Callable[[AttentionConfig], AttentionConfig]


class Hypothesis(NamedTuple):
    """A fault: its short name, what the graph does, and the attention with the fault, which is an
    equal one if it cannot have it.
    """

    cause: str
    words: str
    change: Change = lambda attention: attention


def explained(
    models: Iterable[Tuple[Hypothesis, Any]],
    expected: np.ndarray,
    tokens: np.ndarray,
    actual: np.ndarray,
    tolerance: float,
) -> Optional[Hypothesis]:
    """Return the fault that explains the outputs `actual` [B,L,V] of a full pass of tokens, ids
    [B,L] or hidden states [B,L,E], or None.

    Args:
        models: faults with models that have them; None for what a model cannot have.
        expected: outputs without a fault, of the shape that models return.
        tolerance: largest error of a right graph.
    """
    scale = float(np.abs(actual).max()) or 1.0

    def error(outputs: np.ndarray) -> float:
        return float(np.abs(outputs - actual).max(initial=0))

    most, own = NEAR * tolerance * scale, error(expected)
    if own > tolerance * scale:  # else only shorter sequences are wrong, as with long factors
        most = min(most, own / NEAR)
    for hypothesis, model in models:
        of: Any = model if isinstance(model, TransformersModel) else getattr(model, "config", None)
        if of is not None and tokens.shape[1] <= (of.max_positions or 0):
            if error(_outputs(model, tokens)) <= most:
                return hypothesis
    return None


def _outputs(model: Any, tokens: np.ndarray) -> np.ndarray:
    if isinstance(model, TransformersModel):
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(tokens)))
    return full_pass(eager_session(model, tokens.shape[1]), tokens, 0, None)


def with_faults(model: Any, faults: Iterable[Hypothesis]) -> Iterator[Tuple[Hypothesis, Any]]:
    """Yield faults with models that have them; None for what the model cannot have."""
    for fault in faults:
        with contextlib.suppress(ValueError):  # of a description that no model can have
            yield fault, changed(model, fault.change)


def descriptions(model: Any) -> Iterator[Hypothesis]:
    """Yield what a description of weights may have wrong: encodings and numbers of heads that fit
    them, and factors of scores.
    """
    own: AttentionConfig = model.config.attentions[0]
    rotations: Dict[str, Spec] = {"rope": {"name": "rope"}}
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
        yield Hypothesis("encoding", words, _with(encodings=(spec,)))
    for size in range(1, own.heads * own.head_size + 1):
        heads, rest = divmod(own.heads * own.head_size, size)
        if not rest:
            kv_heads = own.kv_heads * own.head_size // size
            sizes = _with(heads=heads, kv_heads=kv_heads, head_size=size)
            yield Hypothesis("heads", f"the number of heads is {heads}", sizes)
    for factor in factors_of(own.head_size):
        words = f"scores are scaled by {factor:.6g} times the factor of the reference"
        yield Hypothesis("scale", words, _scaled(factor))


def factors_of(size: int) -> Iterator[float]:
    """Yield factors by which scores of heads of a size may be scaled in error: also by 1, 1/D, and
    those of other sizes.
    """
    factors = [2.0, 0.5, 2**0.5, 0.5**0.5, 4.0, 0.25]
    factors += [size**0.5, size**-0.5, (size / 64) ** 0.5, (size / 128) ** 0.5]
    yield from (factor for factor in dict.fromkeys(factors) if factor != 1)


def changed(model: Any, change: Change) -> Any:
    """Return a block or stack with the same weights whose attentions are changed; None if none
    changes, or if weights of other shapes are needed.
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
