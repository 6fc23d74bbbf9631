"""Cache content that a rewind or a reset has hidden must not reach an output."""

import functools
from typing import Any

import numpy as np
import pytest

from posenc_export.export.expected import eager_session
from posenc_export.runtime import Model, load
from posenc_export.shared.numerics import tolerance, worst_error
from tests import traces
from tests.cases import choice
from tests.tiny import block

# One encoding for each way in which graphs read keys, values and states.
NAMES = "rope fox cope shaw deberta rope_longrope-short rope_dynamic-short input_rnn".split()
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in NAMES},
    "linear": ("rope", {"mechanism": "linear", "kv_heads": 6}),
}
COUNTED = [(target, "positions") for target in ("onnx", "onnx-static", "ort", "torchscript")]
TARGETS = [*COUNTED, ("onnx-static", "mask"), ("ort", "mask")]
# Targets of each kind in `make test`. Graphs read replaced states in the same way on all ONNX
# targets. Signature mask needs another trace.
QUICK = {
    "rope": TARGETS,
    **dict.fromkeys(("fox", "rope_longrope-short"), COUNTED),
    **dict.fromkeys(("linear", "input_rnn"), COUNTED[2:]),
}
EACH = [(kind, *where) for kind in KINDS for where in TARGETS]
TAKEN = {(kind, *where) for kind, targets in QUICK.items() for where in targets}
X = np.random.default_rng(0).standard_normal((3, 24, 48)).astype(np.float32)


@functools.cache
def model(kind: str, target: str, signature: str) -> Model:
    """Export and load the block of a kind."""
    folder = traces.artefact(config(kind), target, signature=signature)
    return load(folder, provider="cpu", threads=1)


def config(kind: str) -> Any:
    variant, overrides = KINDS[kind]
    return block(variant, max_positions=64, **overrides)


@functools.cache
def whole(kind: str) -> np.ndarray:
    """Return the outputs of one pass over X."""
    return eager_session(traces.sources(config(kind)).model).prefill(X, chunk=24)


@pytest.mark.parametrize("poison", choice([np.nan, np.inf], [np.nan]))
@pytest.mark.parametrize(("kind", "target", "signature"), choice(EACH, TAKEN, grouped=True))
def test_numbers_that_are_none_are_gone_after_a_rewind_and_after_a_reset(
    kind: str, target: str, signature: str, poison: float
) -> None:
    full = whole(kind)
    session, bound = model(kind, target, signature).session(), tolerance("float32", 1, 96)
    spoilt = X.copy()
    spoilt[:2, 7:] = poison
    session.prefill(spoilt[:, :10])
    session.step(spoilt[:, 10])
    session.rewind([4, 5, 0])
    outputs = session.prefill([X[0, 7:14], X[1, 6:10], X[2, 11:12]])
    for row, (first, last) in enumerate(((7, 14), (6, 10), (11, 12))):
        assert worst_error(outputs[row, : last - first], full[row, first:last]) <= bound
    at = session.length
    assert worst_error(session.step(X[range(3), at]), full[range(3), at]) <= bound
    session.prefill(np.full_like(X[:, :3], poison))
    session.reset()
    assert worst_error(session.prefill(X[:, :20], chunk=7), full[:, :20]) <= bound
