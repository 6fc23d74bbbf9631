"""Opening what a graph is compared with: checkpoints, and modules and functions (modules.py).

Shapes: as in facts.py.
"""

import functools
import inspect
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import numpy as np
import torch

from posenc_export.auditing import configurations, facts, modules
from posenc_export.auditing.facts import Facts
from posenc_export.export import expected
from posenc_export.export.expected import edges_of
from posenc_export.export.hypotheses import Hypothesis
from posenc_export.export.read_module import as_model
from posenc_export.models.by_transformers import Published
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.artefact.records import Places
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.session.session import Session
from posenc_export.shared.numerics import tolerance, worst_error

TRIED = 24  # tokens


class Exact:
    """A checkpoint as this package reads it. build: returns it, given `max_positions` of
    from_pretrained.
    """

    def __init__(self, build: Callable[[Optional[int]], Published]) -> None:
        self.build, self.model = build, build(None)
        self.read = as_model(self.model)
        self.facts = self._facts()
        self._sessions: Dict[Tuple[bool, int], Session] = {}

    def _built(self, short: bool) -> Published:
        """Return the model with the factors of LongRoPE for short texts, or those of its range."""
        return self.build(self.facts.whole) if short else self.model

    def _facts(self) -> Facts:
        manifest = expected.eager_session(self.read, 8).manifest
        places = manifest.places or Places()
        caches = [s.axes for s in manifest.states if len(s.axes) == 4]
        # Of chunks, transformers counts positions in the mask, not in position_ids.
        counted = any("//" in rule for rule in places.sees)
        depth, reduction = expected.extent(self.read)
        return Facts(
            width=int(manifest.outputs[0].axes[-1]),
            vocabulary=manifest.vocabulary,
            features=0 if manifest.vocabulary else int(manifest.inputs[0].axes[-1]),
            positions=manifest.max_positions,
            causal=bool(manifest.states),
            edges=edges_of(self.read),
            tolerance=tolerance("float32", depth, reduction),
            depth=depth,
            whole=self.model.trained,
            heads=(int(caches[0][1]), int(caches[0][3])) if caches else (0, 0),
            starts=not counted and self._starts(manifest),
            biased="" in places.sees or any(places.biases),
            sees=tuple(places.sees),
        )

    def _starts(self, manifest: Manifest) -> bool:
        """Whether transformers computes a sequence that begins at another position as it was read,
        tried with numbers.
        """
        takes = inspect.signature(self.model.model.forward).parameters
        if not self.model.causal or "position_ids" not in takes:
            return True
        count = min(TRIED, manifest.max_positions // 2)
        start = (manifest.max_positions - count) // 2
        tokens = np.arange(count)[None] % self.model.vocabulary
        ours = expected.full_pass(expected.eager_session(self.read, count), tokens, start, None)
        with torch.no_grad():
            theirs = self.model(torch.from_numpy(tokens), torch.arange(start, start + count)[None])
        return worst_error(ours, theirs.numpy()) <= 1e-4

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """As Reference.outputs. Beyond the original length, LongRoPE has its long factors."""
        short = start + tokens.shape[1] <= self.facts.whole
        capacity = 1 << (tokens.shape[1] - 1).bit_length()
        key = (short, capacity)
        if key not in self._sessions:
            model = as_model(self._built(short)) if short else self.read
            self._sessions[key] = expected.eager_session(model, min(capacity, self.facts.positions))
        return expected.full_pass(self._sessions[key], tokens, start, None)

    def faulty(self, length: int) -> Iterator[Tuple[Hypothesis, Published]]:
        """As configurations.with_faults, for `length` tokens."""
        yield from configurations.with_faults(self._built(length <= self.facts.whole))
        for name in ("long", "short") if self.model.trained else ():
            words = f"the rotation has the {name} factors at every length"
            yield Hypothesis(f"{name} factors always", words), self._built(name == "short")

    def changed(self, change: Callable[[Any], Any]) -> "Exact":
        """As Reference.changed."""
        return Exact(lambda positions: change(self.build(positions)))


def open_reference(text: Any, hidden: bool, vocabulary: int, features: int) -> facts.Reference:
    """Return what a graph is compared with.

    Args:
        text: a checkpoint folder, a GGUF file, or a model, a module or a function.
        hidden: whether the graph returns hidden states and not logits.
        vocabulary, features: what the graph reads.

    Raises:
        ValueError: nothing of this kind.
    """
    if callable(text):
        return modules.Called(text, vocabulary, features)
    return Exact(functools.partial(_checkpoint, Path(text), not hidden))


def _checkpoint(path: Path, head: bool, positions: Optional[int]) -> Published:
    """Load a checkpoint; one that states no number of positions gets UNSTATED."""
    try:
        return from_pretrained(path, positions, head=head)
    except ValueError as error:
        if "give max_positions" not in str(error) or positions is not None:
            raise
        return from_pretrained(path, facts.UNSTATED, head=head)
