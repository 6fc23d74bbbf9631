"""What a graph is compared with: checkpoints, and modules and functions of others.

Shapes: as in facts.py.
"""

import bisect
import copy
import functools
import inspect
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import numpy as np
import torch

from posenc_export.auditing import configurations
from posenc_export.auditing.facts import UNSTATED, Facts, Reference
from posenc_export.export import expected
from posenc_export.export.comparison import first_output
from posenc_export.export.expected import edges_of
from posenc_export.export.hypotheses import Hypothesis
from posenc_export.export.read_module import as_model
from posenc_export.models.by_transformers import LENGTHS, TransformersModel, limits_of
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.artefact.records import Places
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.session.session import Session
from posenc_export.shared.foreign import explained
from posenc_export.shared.numerics import tolerance, worst_error
from posenc_export.shared.refusal import refusal

TRIED = 24  # tokens
SHORTEST = 6  # of the sequences of a module that is called
ORIGINAL = "original_max_position_embeddings"
MODEL = "give the model of this graph"
BY_LENGTH = ("longrope", "dynamic")  # rotations whose angles depend on the length of a sequence


class Exact:
    """A checkpoint as this package reads it. build: returns it, given `max_positions` of
    from_pretrained.
    """

    def __init__(self, build: Callable[[int | None], TransformersModel]) -> None:
        self._open(build)
        self.facts = self._facts()

    def _open(self, build: Callable[[int | None], TransformersModel]) -> None:
        self.build, self.model = build, build(None)
        self.read = as_model(self.model)
        self._sessions: dict[tuple[bool, int], Session] = {}

    def _built(self, short: bool) -> TransformersModel:
        """Return the model with the factors of LongRoPE for short texts, or those of its range."""
        return self.build(self.facts.whole) if short else self.model

    def _facts(self) -> Facts:
        manifest = expected.eager_session(self.read, 8).manifest
        places = manifest.places or Places()
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
            starts=not counted and self._starts(manifest),
            biased="" in places.sees or any(places.biases),
            sees=tuple(places.sees),
        )

    def _starts(self, manifest: Manifest) -> bool:
        """Return whether transformers, given position_ids that do not begin at 0, gives the outputs
        of the model as it was read, tried on one sequence. True for a bidirectional model, and
        for one without position_ids.
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

    def faulty(self, length: int) -> Iterator[tuple[Hypothesis, TransformersModel]]:
        """As configurations.with_faults, for `length` tokens."""
        yield from configurations.with_faults(self._built(length <= self.facts.whole))
        for name in ("long", "short") if self.model.trained else ():
            words = f"the rotation has the {name} factors at every length"
            yield Hypothesis(f"{name} factors always", words), self._built(name == "short")

    def changed(self, change: Callable[[Any], Any]) -> "Exact":
        """As Reference.changed."""
        other = copy.copy(self)
        other._open(lambda positions: change(self.build(positions)))
        return other


class Called:
    """A torch.nn.Module or a function, called with whole sequences as transformers calls one.

    Args:
        module: takes input_ids or the like first, and attention_mask and position_ids if its
            forward names them; returns a tensor [B,L,V], a tuple that begins with one, or an object
            with logits or last_hidden_state. One that returns the last token's [B,1,V] alone is
            called with the first 1 .. L tokens.
        vocabulary, features: what the graph reads, for a module without a config.
    """

    def __init__(self, module: Callable[..., Any], vocabulary: int, features: int) -> None:
        self.module = module
        self.model = module.eval() if isinstance(module, torch.nn.Module) else None
        self.names = [*inspect.signature(getattr(module, "forward", module)).parameters]
        config = getattr(module, "config", None)
        self.vocabulary = vocabulary and (_size(config, "vocab_size") or vocabulary)
        self.facts = self._facts(config, features)

    def _facts(self, config: Any, features: int) -> Facts:
        positions = _size(config, *LENGTHS) or self._most(features)
        depth = _size(config, "num_hidden_layers") or 2
        weights = list(getattr(self.module, "parameters", list)())
        longest = max((p.shape[-1] for p in weights if p.dim() > 1), default=64)
        rounding = tolerance("float32", depth, longest)
        tokens = self._tokens(SHORTEST, features)
        whole, changed = self.outputs(tokens), tokens.copy()
        changed[:, -1] = (changed[:, -1] + 1) % (self.vocabulary or 3)
        change = worst_error(self.outputs(changed)[:, :-1], whole[:, :-1])
        return Facts(
            width=whole.shape[-1],
            vocabulary=self.vocabulary,
            features=features,
            positions=positions,
            causal=bool(change <= rounding),
            edges={name: at for name, at in limits_of(config).items() if 0 < at < positions},
            tolerance=rounding,
            depth=depth,
            whole=_size(config, ORIGINAL) if _rotation(config).get("rope_type") in BY_LENGTH else 0,
            starts="position_ids" in self.names[1:],
        )

    def _tokens(self, length: int, features: int) -> np.ndarray:
        """Return a sequence."""
        if self.vocabulary:
            return np.arange(length)[None] % self.vocabulary
        return np.ones((1, length, features), np.float32)

    def _most(self, features: int) -> int:
        """Return the largest number of tokens that the module takes, at most UNSTATED."""

        def fails(length: int) -> bool:
            try:
                self._called(self._tokens(length, features), 0)
            except ValueError:
                return True
            return False

        taken = SHORTEST
        while not fails(most := min(2 * taken, UNSTATED)):
            if most == UNSTATED:
                return UNSTATED
            taken = most
        return bisect.bisect_left(range(most), True, taken + 1, most, key=fails) - 1

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """As Reference.outputs. Raise ValueError for a module that does not compute them."""
        outputs, length = self._called(tokens, start), tokens.shape[1]
        if outputs.shape[1] == length:
            return outputs
        before = [self._called(tokens[:, :n], start) for n in range(1, length)]
        return np.concatenate((*before, outputs), 1)

    def _called(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Call the module. Return its outputs for all tokens or the last one."""
        rows, length = tokens.shape[:2]
        first = torch.from_numpy(np.ascontiguousarray(tokens))
        key = "input_ids" if self.vocabulary else "inputs_embeds"
        known = {
            "attention_mask": torch.ones(rows, length, dtype=torch.int64),
            "position_ids": torch.arange(start, start + length).expand(rows, -1),
            "use_cache": False,
        }
        named = {name: value for name, value in known.items() if name in self.names[1:]}
        arguments = () if key in self.names else (first,)
        rule = f"a reference that returns numbers [{rows},{length},V] or [{rows},1,V] for {key}"
        with torch.no_grad(), explained(f"audit: expected {rule}", MODEL):
            value = self.module(*arguments, **named, **({} if arguments else {key: first}))
            outputs = np.asarray(first_output(value).detach().float().cpu().numpy())
        right = outputs.ndim == 3 and outputs.shape[0] == rows and outputs.shape[1] in (1, length)
        if not (right and outputs.size):
            raise refusal("audit", rule, list(outputs.shape), MODEL)
        return outputs

    def changed(self, change: Callable[[Any], Any]) -> "Called":
        """As Reference.changed."""
        other = copy.copy(self)
        other.module = other.model = change(self.module)
        return other


def _rotation(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _size(config: Any, *names: str) -> int:
    """Return the first integer that a config or its rope_parameters has under one of some names;
    0 if there is none.
    """
    sizes = [getattr(config, name, None) or _rotation(config).get(name) for name in names]
    return next((size for size in sizes if isinstance(size, int)), 0)


def open_reference(text: Any, hidden: bool, vocabulary: int, features: int) -> Reference:
    """Return what a graph is compared with.

    Args:
        text: a checkpoint folder, a GGUF file, or a model, a module or a function.
        hidden: whether the graph returns hidden states and not logits.
        vocabulary, features: what the graph reads.

    Raises:
        ValueError: nothing of this kind.
    """
    if callable(text):
        return Called(text, vocabulary, features)
    return Exact(functools.partial(_checkpoint, Path(text), not hidden))


def _checkpoint(path: Path, head: bool, positions: int | None) -> TransformersModel:
    """Load a checkpoint; one that states no number of positions gets UNSTATED."""
    try:
        return from_pretrained(path, positions, head=head)
    except ValueError as error:
        if "give max_positions" not in str(error) or positions is not None:
            raise
        return from_pretrained(path, UNSTATED, head=head)
