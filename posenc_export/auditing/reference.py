"""Opening what a graph is compared with: exact models, and references of others (modules.py).

Shapes: as in facts.py.
"""

import functools
import inspect
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import numpy as np
import torch

from posenc_export.auditing import configurations, facts, modules
from posenc_export.auditing.configurations import Hypothesis
from posenc_export.auditing.facts import Facts
from posenc_export.export import bounds, expected
from posenc_export.export.edges import edges_of
from posenc_export.export.read_module import as_model
from posenc_export.models.by_transformers import Published
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.artefact.records import Places
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import described
from posenc_export.shared.numerics import tolerance, worst_error
from posenc_export.shared.refusal import refusal

TRIED = 24  # tokens
# Encodings whose angles depend on the length of the sequence: the length that they were trained
# with, unless it is stated
ORIGINAL = {"rope_dynamic": 2048, "rope_longrope": 4096}


class Exact:
    """A model of this package, or one that it reads. build: returns it, given `max_positions` of
    from_pretrained.
    """

    def __init__(self, build: Callable[[Optional[int]], Any]) -> None:
        self.build, self.model = build, build(None)
        self.read = as_model(self.model)
        self.facts = self._facts()
        self._sessions: Dict[Tuple[bool, int], Session] = {}

    def _built(self, short: bool) -> Any:
        """Return the model with the factors of LongRoPE for short texts, or those of its range."""
        return self.build(self.facts.whole) if short else self.model

    def _facts(self) -> Facts:
        manifest = expected.eager_session(self.read, 8).manifest
        attentions, places = described.attentions(manifest), manifest.places or Places()
        specs = [spec for spec in described.encodings(manifest) if spec["name"] in ORIGINAL]
        originals = [s.get("original_max_positions", ORIGINAL[s["name"]]) for s in specs]
        if trained := getattr(self.read, "trained", 0):  # of LongRoPE
            originals = [trained]
        sizes = {part["sees"].get("size", 0) for part in attentions}
        heads = [(part["kv_heads"], part["head_size"]) for part in attentions]
        heads += [(s.axes[1], s.axes[3]) for s in manifest.states if len(s.axes) == 4]
        # Whose positions transformers counts in the mask, not in position_ids.
        counted = any(part["sees"]["name"] == "chunk" for part in attentions)
        counted |= any("//" in rule for rule in places.sees)  # chunks of a module that was read
        depth, reduction = bounds.extent(self.read)
        return Facts(
            width=int(manifest.outputs[0].axes[-1]),
            vocabulary=manifest.vocabulary,
            features=0 if manifest.vocabulary else int(manifest.inputs[0].axes[-1]),
            positions=manifest.max_positions,
            causal=bool(manifest.states),
            edges=edges_of(self.read),
            tolerance=tolerance("float32", depth, reduction),
            depth=depth,
            whole=min(originals, default=0),
            window=sizes.pop() if len(sizes) == 1 else 0,
            heads=heads[0] if heads else (0, 0),
            starts=not counted and self._starts(manifest),
            biased="" in places.sees or any(places.biases),
            sees=tuple(places.sees),
        )

    def _starts(self, manifest: Manifest) -> bool:
        """Whether transformers computes a sequence that begins at another position as this model
        does, tried with numbers.
        """
        captured = getattr(self.read, "captured", None)
        read = None if captured is None else captured.module.module
        if not isinstance(read, Published) or not read.causal:
            return True
        if "position_ids" not in inspect.signature(read.model.forward).parameters:
            return True
        count = min(TRIED, manifest.max_positions // 2)
        start = (manifest.max_positions - count) // 2
        tokens = np.arange(count)[None] % read.vocabulary
        ours = expected.full_pass(expected.eager_session(self.read, count), tokens, start, None)
        with torch.no_grad():
            theirs = read(torch.from_numpy(tokens), torch.arange(start, start + count)[None])
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
        """As configurations.with_faults, for `length` tokens; none of a described model."""
        if isinstance(self.model, Published):
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
    if isinstance(text, torch.nn.Module) and hasattr(text, "attentions"):
        return Exact(lambda positions: text)
    if callable(text):
        return modules.Called(text, vocabulary, features)
    text = str(text)
    path = Path(text)
    if not text or not path.exists():
        remedy = "give a checkpoint folder or a GGUF file"
        raise refusal("audit", "a reference that exists", repr(text), remedy)
    return Exact(functools.partial(_checkpoint, path, not hidden))


def _checkpoint(path: Path, head: bool, positions: Optional[int]) -> Any:
    """Load a checkpoint; one that states no number of positions gets UNSTATED."""
    try:
        return from_pretrained(path, positions, head=head)
    except ValueError as error:
        if "give max_positions" not in str(error) or positions is not None:
            raise
        return from_pretrained(path, facts.UNSTATED, head=head)
