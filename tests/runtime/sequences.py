"""Tiny decoders, exported once, and their expected outputs for a few token sequences: a session
can be checked at any length.
"""

import functools
from typing import Sequence

import numpy as np

from posenc_export.export import Sources
from posenc_export.export.describe import eager
from posenc_export.runtime import Model, Session, load
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.shared.numerics import tolerance, worst_error
from tests import traces
from tests.tiny import decoder

LENGTH = 40
CAPACITY = LENGTH + 8  # slots of caches that some tests fill
ROWS = 4
# Kinds of states: caches only; caches and gates; caches and a state that each call replaces; only
# states that each call replaces.
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "rope": ("rope", {}),
    "fox": ("fox", {}),
    "input_rnn": ("input_rnn", {}),
    "linear": ("rope", {"mechanism": "linear", "kv_heads": 6}),
}


def sources(kind: str) -> Sources:
    variant, overrides = KINDS[kind]
    return traces.sources(decoder(variant, **overrides))


@functools.cache
def model(kind: str, target: str, signature: str = "positions") -> Model:
    """Load the decoder of a kind."""
    variant, overrides = KINDS[kind]
    folder = traces.artefact(decoder(variant, **overrides), target, signature=signature)
    return load(folder, provider="cpu", threads=1)


@functools.cache
def texts() -> np.ndarray:
    """Return the token sequences [ROWS,LENGTH]."""
    return np.random.default_rng(0).integers(61, size=(ROWS, LENGTH))


@functools.cache
def full(kind: str) -> np.ndarray:
    """Return the outputs of one pass of the eager module over `texts` [ROWS,LENGTH,V]."""
    return eager_session(kind).prefill(texts(), chunk=LENGTH)


def eager_session(kind: str) -> Session:
    module, manifest = eager(sources(kind).model)
    return Model(TorchGraph(module, manifest)).session()


def excess(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the worst error relative to the tolerance: at most 1 if the outputs are right."""
    return worst_error(actual, expected) / tolerance("float32", 2, 48)


def worst_ahead(
    session: Session, kind: str, order: Sequence[int], steps: int = 2, back: int | None = None
) -> float:
    """Feed further tokens to a session whose row b reads texts()[order[b]]: a ragged call, a
    rewind, then steps. Return the worst excess.
    """
    worst = 0.0
    at = session.length
    more = [
        row[a : a + 2 + index % 2]
        for index, (row, a) in enumerate(zip(texts()[list(order)], at, strict=True))
    ]
    result = session.prefill(more)
    for index, (row, a, part) in enumerate(zip(order, at, more, strict=True)):
        worst = max(worst, excess(result[index, : len(part)], full(kind)[row, a : a + len(part)]))
    session.rewind(1 if back is None else back)
    for _ in range(steps):
        at = session.length
        result = session.step(texts()[list(order), at])
        worst = max(worst, excess(result, full(kind)[list(order), at]))
    return worst
