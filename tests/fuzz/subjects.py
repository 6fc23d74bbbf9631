"""Artefacts for the session fuzzer, and the eager module's outputs for a single row.

Shapes: L positions of the range, E model width, V numbers of an output.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from msgspec.structs import replace

from posenc_export.export import Sources, export
from posenc_export.export.describe import accuracy_of, eager
from posenc_export.models.presets import seeded
from posenc_export.runtime import Model, Session, load
from posenc_export.runtime.torch_graph import TorchGraph
from tests.tiny import block, decoder, encoder, reading

TEXTS = 5  # number of token sequences, and of sequences of coordinates or segments
ROUND = 48  # lengths of full passes are rounded up to a multiple of this, so that later calls can reuse them
ENCODED = (7, 2, 5, 1, 9)  # lengths of the encoder sequences in tokens
KEPT = 400  # most full passes in the cache


class Spec(NamedTuple):
    """Specification of an artefact: variant of tests.tiny, kind of model (KINDS), target, signature, and number of positions."""

    variant: str
    kind: str
    target: str
    signature: str = "positions"
    size: int = 40

    def __str__(self) -> str:
        return "-".join(map(str, self))


class Token(NamedTuple):
    """A token of a row: index of its text, and of its sequence of coordinates or segments; -1 for the default ones."""

    text: int
    beside: int = -1


KINDS: Dict[str, Callable[[str, int], Any]] = {
    "decoder": lambda variant, size: decoder(variant, max_positions=size),
    "block": lambda variant, size: block(variant, max_positions=size),
    "reading": lambda variant, size: reading(variant, max_positions=size),
    "linear": lambda variant, size: decoder(variant, max_positions=size, mechanism="linear", kv_heads=6),
    "bidirectional": lambda variant, size: block(variant, max_positions=size, causal=False),
    "encoder": lambda variant, size: replace(encoder(variant), max_positions=size),
}


class Subject:
    """An artefact, the texts for its rows, and the eager module.

    Args:
        spec: the artefact to export.
        folder: folder of the artefact.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        made = sources(spec.variant, spec.kind, spec.size)
        export(made, spec.target, folder, signature=spec.signature, verify=False)
        self.spec, self.model = spec, load(folder, provider="cpu", threads=1)
        self.manifest = self.model.manifest
        self.bound = accuracy_of(made.model, self.manifest).tolerance
        self.cached = bool(self.manifest.states)
        self.in_place = any(state.update == "in_place" for state in self.manifest.states)
        self.replaces = any(state.update == "replace" for state in self.manifest.states)
        self.columns = self.manifest.layout == "columns"
        self.vocabulary = self.manifest.vocabulary
        # Tokens have one kind of attributes here: with coordinates, all tokens are of segment 0.
        self.segments = 0 if self.manifest.axes else self.manifest.segments
        random = np.random.default_rng(0)
        self.texts = random.integers(61, size=(TEXTS, spec.size)) if self.vocabulary else random.standard_normal((TEXTS, spec.size, 48)).astype(np.float32)
        self.beside = random.integers(self.segments or spec.size, size=(TEXTS, self.manifest.axes or 1, spec.size))
        numbers = sum(int(value.axes[1]) * int(value.axes[3]) for value in self.manifest.encoder[1:])
        self.encoded = [random.standard_normal((length, numbers)).astype(np.float32) for length in ENCODED] if numbers else []
        self._eager, self._passes = eager_session(spec), {}  # type: ignore[var-annotated]

    def tokens(self, row: List[Token], first: int = 0) -> np.ndarray:
        """Return the tokens of a row from index `first` on, [n] or [n,E]."""
        empty = self.texts[0, :0]
        return np.stack([self.texts[token.text, place] for place, token in enumerate(row[first:], first)]) if row[first:] else empty

    def numbers(self, row: List[Token], start: int, first: int = 0) -> np.ndarray:
        """Return the coordinates [axes,n] or segments [1,n] of a row from index `first` on."""
        none = [start if self.manifest.axes else 0, 1 if self.manifest.axes else 0]
        columns = [
            self.beside[token.beside, :, place] if token.beside >= 0 else np.full(self.beside.shape[1], none[0] + none[1] * place)
            for place, token in enumerate(row[first:], first)
        ]
        return np.stack(columns, axis=1).astype(np.int64) if columns else np.zeros((self.beside.shape[1], 0), np.int64)

    def full(self, start: int, row: List[Token], source: int = 0) -> np.ndarray:
        """Return the eager module's outputs for a single row in one pass, at least [len(row),V]; causal models are given further tokens after the row.

        Args:
            source: index of its encoder sequence in `encoded`, if the model reads an encoder.
        """
        wanted = min(-(-len(row) // ROUND) * ROUND, self.spec.size - start) if self.cached else len(row)
        whole = tuple(row) + (row[-1],) * (wanted - len(row))
        key = (start, source, whole)
        if key not in self._passes:
            if len(self._passes) >= KEPT:
                self._passes.clear()
            self._passes[key] = self._pass(start, list(whole), source)
        return self._passes[key]  # type: ignore[no-any-return]

    def _pass(self, start: int, row: List[Token], source: int) -> np.ndarray:
        numbers, tokens = self.numbers(row, start)[:, None], self.tokens(row)[None]
        self._eager.reset()
        grid: Optional[np.ndarray] = numbers if self.manifest.axes else None
        given = self.encoded[source : source + 1] or None
        return self._eager.prefill(tokens, start=start, chunk=len(row), grid=grid, token_types=numbers[0] if self.segments else None, encoder=given)[0]


@functools.lru_cache(maxsize=8)
def sources(variant: str, kind: str, size: int) -> Sources:
    """Return the module of a spec, traced once for all targets."""
    return Sources(seeded(KINDS[kind](variant, size)))


def eager_session(spec: Spec) -> Session:
    """Open a session on the eager module."""
    module, manifest = eager(sources(spec.variant, spec.kind, spec.size).model)
    return Model(TorchGraph(module, manifest)).session()


_folders: List["tempfile.TemporaryDirectory[str]"] = []
Row = Tuple[int, List[Token]]


@functools.lru_cache(maxsize=None)
def subject(spec: Spec) -> Subject:
    """Return the subject of a spec, created once."""
    _folders.append(tempfile.TemporaryDirectory())
    return Subject(spec, Path(_folders[-1].name) / "artefact")
