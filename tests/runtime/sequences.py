"""Tiny decoders exported once, with what every prefix of a few token sequences must give: a session is checked wherever it stands."""

import functools
import tempfile
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export.export import Sources, export
from posenc_export.export.describe import eager
from posenc_export.models.presets import seeded
from posenc_export.numerics import tolerance, worst_error
from posenc_export.runtime import Model, Session, load
from posenc_export.runtime.torch_graph import TorchGraph
from tests.tiny import decoder

LENGTH = 40
ROWS = 4
# What the states of a graph do: caches alone, gates beside them, a state that each call replaces beside them, nothing but such states.
KINDS: Dict[str, Tuple[str, Dict[str, object]]] = {
    "rope": ("rope", {}),
    "fox": ("fox", {}),
    "input_rnn": ("input_rnn", {}),
    "linear": ("rope", {"mechanism": "linear", "kv_heads": 6}),
}
_folders: List["tempfile.TemporaryDirectory[str]"] = []


@functools.lru_cache(maxsize=None)
def sources(kind: str) -> Sources:
    variant, overrides = KINDS[kind]
    return Sources(seeded(decoder(variant, max_positions=LENGTH + 8, **overrides)))


@functools.lru_cache(maxsize=None)
def model(kind: str, target: str, signature: str = "positions") -> Model:
    """The decoder of a kind, exported and loaded."""
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name) / "artefact"
    export(sources(kind), target, folder, signature=signature, verify=False)
    return load(folder, provider="cpu", threads=1)


@functools.lru_cache(maxsize=None)
def texts() -> np.ndarray:
    """Token sequences [ROWS,LENGTH]."""
    return np.random.default_rng(0).integers(61, size=(ROWS, LENGTH))


@functools.lru_cache(maxsize=None)
def full(kind: str) -> np.ndarray:
    """What one pass of the eager module gives for `texts` [ROWS,LENGTH,V]."""
    return eager_session(kind).prefill(texts(), chunk=LENGTH)


def eager_session(kind: str) -> Session:
    module, manifest = eager(sources(kind).model)
    return Model(TorchGraph(module, manifest)).session()


def excess(actual: np.ndarray, expected: np.ndarray) -> float:
    """Worst error over what rounding explains: at most 1 where all is right."""
    return worst_error(actual, expected) / tolerance("float32", 2, 48)


def worst_ahead(session: Session, kind: str, order: Sequence[int], steps: int = 2, back: Optional[int] = None) -> float:
    """Worst excess over the next tokens of a session whose row b reads texts()[order[b]], by a ragged call, a rewind and steps."""
    worst = 0.0
    at = session.length
    more = [row[a : a + 2 + index % 2] for index, (row, a) in enumerate(zip(texts()[list(order)], at, strict=True))]
    result = session.prefill(more)
    for index, (row, a, part) in enumerate(zip(order, at, more, strict=True)):
        worst = max(worst, excess(result[index, : len(part)], full(kind)[row, a : a + len(part)]))
    session.rewind(1 if back is None else back)
    for _ in range(steps):
        at = session.length
        result = session.step(texts()[list(order), at])
        worst = max(worst, excess(result, full(kind)[list(order), at]))
    return worst
