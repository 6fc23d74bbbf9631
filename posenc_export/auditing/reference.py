"""What a graph is compared with: an exact model, a module, or an artefact.

Shapes: B batch, L tokens, E model width, V numbers of an output.
"""

import copy
import functools
import importlib
import inspect
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Protocol, Tuple

import msgspec
import numpy as np
import torch

from posenc_export.export.bounds import extent
from posenc_export.export.conditioning import disturbed
from posenc_export.export.edges import edges_of
from posenc_export.export.expected import eager_session, full_pass
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.stack import Stack
from posenc_export.models.user_module import inner_of
from posenc_export.runtime import load
from posenc_export.runtime.artefact.manifest import FILE_NAME
from posenc_export.runtime.session.session import Session
from posenc_export.shared.numerics import tolerance
from posenc_export.shared.refusal import refusal

TRANSFORMERS = "transformers:"
# Names of a config's sizes, by what they mean here.
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
EDGES = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
FIELDS = ("logits", "last_hidden_state", "output")
BY_LENGTH = ("rope_dynamic", "rope_longrope")  # angles depend on the length of the sequence
UNSTATED = 4096  # positions of a model that does not state a number


@dataclass(frozen=True)
class Facts:
    """What a reference says about itself.

    Args:
        width: numbers of an output for each token V.
        vocabulary: number of token ids; 0 if it reads hidden states.
        features: size E of the hidden states that it reads.
        positions: number of positions.
        causal: whether a token sees no later ones.
        edges: positions and distances at which the computation changes, by name.
        tolerance: largest error that rounding in float32 explains.
        depth: number of layers.
        whole: number of tokens from which on the numbers of a token depend on how many follow it,
            so that only whole sequences are compared; 0 for none.
        window: number of keys of every layer; 0 if there is no window or layers differ.
        starts: whether sequences can begin at other positions than 0.
    """

    width: int
    vocabulary: int
    features: int
    positions: int
    causal: bool
    edges: Mapping[str, int]
    tolerance: float
    depth: int
    whole: int = 0
    window: int = 0
    starts: bool = True


class Reference(Protocol):
    """Computes whole sequences."""

    facts: Facts

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """Return the outputs [B,L,V] of rows of equal length, float32."""

    def disturbed(self, seed: int) -> Optional["Reference"]:
        """Return the reference with a last digit of each weight changed at random, or None."""


class Exact:
    """A model of this package.

    Args:
        build: returns the model; arguments are `lengths` and `max_positions` of from_pretrained.
        hidden: whether the output is the hidden states, for a model with a head.
    """

    def __init__(
        self, build: Callable[[Optional[str], Optional[int]], Any], hidden: bool = False
    ) -> None:
        self.build, self.hidden = build, hidden
        self.model = self.made(None)
        self.facts = self._facts()
        self._sessions: Dict[Tuple[Optional[str], int], Session] = {}

    def made(self, lengths: Optional[str]) -> Any:
        """Return the model with these factors of LongRoPE; None for those of its range."""
        model = self.build(lengths, self.facts.whole if lengths == "short" else None)
        return without_head(model) if self.hidden and isinstance(model, Stack) else model

    def _facts(self) -> Facts:
        model = self.model
        described = eager_session(model, 8).manifest
        edges = {edge.name: edge.at for edge in edges_of(model)}
        attentions = inner_of(model).config.attentions
        sizes = {attention.sees.get("size", 0) for attention in attentions}
        originals = [
            spec["original_max_positions"]
            for attention in attentions
            for spec in attention.encodings
            if spec["name"] in BY_LENGTH
        ]
        depth, reduction = extent(model)
        return Facts(
            width=int(described.outputs[0].axes[-1]),
            vocabulary=described.vocabulary,
            features=0 if described.vocabulary else int(described.inputs[0].axes[-1]),
            positions=described.max_positions,
            causal=bool(described.states),
            edges=edges,
            tolerance=tolerance("float32", depth, reduction),
            depth=depth,
            whole=min(originals, default=0),
            window=sizes.pop() if len(sizes) == 1 else 0,
        )

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """As Reference.outputs. Beyond the original length, LongRoPE has its long factors."""
        lengths = None
        if self.facts.whole:
            lengths = "long" if start + tokens.shape[1] > self.facts.whole else "short"
        capacity = 1 << (tokens.shape[1] - 1).bit_length()
        key = (lengths, capacity)
        if key not in self._sessions:
            model = self.model if lengths is None else self.made(lengths)
            self._sessions[key] = eager_session(model, min(capacity, self.facts.positions))
        return full_pass(self._sessions[key], tokens, start, None)

    def disturbed(self, seed: int) -> "Exact":
        """As Reference.disturbed."""
        return Exact(lambda *how: disturbed(self.build(*how), seed), self.hidden)


class OfArtefact:
    """An artefact of this package."""

    def __init__(self, folder: Path) -> None:
        model = load(folder, provider="cpu", threads=1)
        manifest, self.session = model.manifest, model.session()
        if manifest.reference is None:
            remedy = "export it again, or give the checkpoint"
            raise refusal("audit", "a verified artefact as reference", folder, remedy)
        self.facts = Facts(
            width=int(manifest.outputs[0].axes[-1]),
            vocabulary=manifest.vocabulary,
            features=0 if manifest.vocabulary else int(manifest.inputs[0].axes[-1]),
            positions=manifest.max_positions,
            causal=bool(manifest.states),
            edges=dict(manifest.reference.edges),
            tolerance=2 * manifest.reference.tolerance,
            depth=len(manifest.config.get("order", ("layer",))),
        )

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """As Reference.outputs."""
        self.session.reset()
        return self.session.prefill(tokens, start=start, chunk=tokens.shape[1])

    def disturbed(self, seed: int) -> None:
        """As Reference.disturbed."""


class Called:
    """A torch.nn.Module or a function, called with whole sequences as transformers calls one.

    Args:
        module: takes input_ids or the like first, and attention_mask and position_ids if its
            forward names them; returns a tensor [B,L,V], a tuple that begins with one, or an object
            with logits or last_hidden_state.
        width, vocabulary: of the graph, for a module without a config.
    """

    def __init__(self, module: Callable[..., Any], vocabulary: int, features: int) -> None:
        self.module = module
        if isinstance(module, torch.nn.Module):
            module.eval()
        forward = getattr(module, "forward", module)
        self.names = [*inspect.signature(forward).parameters]
        config = getattr(module, "config", None)
        self.facts = self._facts(config, vocabulary, features)

    def _facts(self, config: Any, vocabulary: int, features: int) -> Facts:
        vocabulary = vocabulary and int(getattr(config, "vocab_size", vocabulary))
        lengths = [getattr(config, name, None) for name in LENGTHS]
        positions = next((int(length) for length in lengths if length), UNSTATED)
        parameters = getattr(config, "rope_parameters", None) or {}
        edges = {}
        for name in EDGES:
            size = getattr(config, name, None) or parameters.get(name)
            if isinstance(size, int) and 0 < size < positions:
                edges[f"{name.replace('_', ' ')} {size}"] = size
        depth = int(getattr(config, "num_hidden_layers", 0) or 2)
        weights = list(getattr(self.module, "parameters", list)())
        longest = max((p.shape[-1] for p in weights if p.dim() > 1), default=64)
        kind = parameters.get("rope_type")
        self.facts = Facts(
            width=0, vocabulary=vocabulary, features=features, positions=positions, causal=True,
            edges=edges, tolerance=tolerance("float32", depth, longest), depth=depth,
            whole=edges.get(f"original max position embeddings "
                            f"{parameters.get('original_max_position_embeddings')}", 0)
            if kind in ("longrope", "dynamic") else 0,
        )  # fmt: skip
        tokens: np.ndarray = np.ones((1, 6, features), np.float32)
        if vocabulary:
            tokens = np.arange(6)[None] % vocabulary
        whole = self.outputs(tokens)
        changed = tokens.copy()
        changed[:, -1] = (changed[:, -1] + 1) % (vocabulary or 3)
        change = np.abs(self.outputs(changed)[:, :-1] - whole[:, :-1]).max() / np.abs(whole).max()
        return replace(
            self.facts,
            width=whole.shape[-1],
            causal=bool(change <= self.facts.tolerance),
            starts="position_ids" in self.names[1:],
        )

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """As Reference.outputs."""
        rows, length = tokens.shape[:2]
        known = {
            "attention_mask": torch.ones(rows, length, dtype=torch.int64),
            "position_ids": torch.arange(start, start + length).expand(rows, -1),
            "use_cache": False,
        }
        named = {name: value for name, value in known.items() if name in self.names[1:]}
        first = torch.from_numpy(np.ascontiguousarray(tokens))
        key = "input_ids" if self.facts.vocabulary else "inputs_embeds"
        with torch.no_grad():
            if key in self.names:
                value = self.module(**{key: first}, **named)
            else:
                value = self.module(first, **named)
        value = value[0] if isinstance(value, (tuple, list)) else value
        value = next((getattr(value, name) for name in FIELDS if hasattr(value, name)), value)
        return value.detach().float().cpu().numpy()

    def disturbed(self, seed: int) -> Optional["Called"]:
        """As Reference.disturbed."""
        if not isinstance(self.module, torch.nn.Module):
            return None
        facts = self.facts
        return Called(disturbed(self.module, seed), facts.vocabulary, facts.features)


def without_head(model: Stack) -> Stack:
    """Return the model without its head, sharing all weights."""
    bare = copy.copy(model)
    bare._modules = dict(model._modules)
    bare.config = msgspec.structs.replace(model.config, head=None)
    bare.head = torch.nn.Identity()
    return bare


def open_reference(text: Any, hidden: bool, vocabulary: int, features: int) -> Reference:
    """Return what a graph is compared with.

    Args:
        text: a checkpoint folder, a GGUF file, the folder of an artefact, transformers:FOLDER,
            package.module:name, or a model, a module or a function.
        hidden: whether the graph returns hidden states and not logits.
        vocabulary, features: what the graph reads.

    Raises:
        ValueError: nothing of this kind.
    """
    if isinstance(text, torch.nn.Module) and hasattr(text, "attentions"):
        return Exact(lambda lengths, positions: text, hidden)
    if callable(text):
        return Called(text, vocabulary, features)
    text = str(text)
    if text.startswith(TRANSFORMERS):
        return Called(
            _of_transformers(text.removeprefix(TRANSFORMERS), hidden), vocabulary, features
        )
    path = Path(text)
    if not path.exists() and ":" in text:
        return open_reference(_named(text), hidden, vocabulary, features)
    if (path / FILE_NAME).exists():
        return OfArtefact(path)
    if not path.exists():
        remedy = "give a checkpoint folder, a GGUF file, an artefact, or package.module:name"
        raise refusal("audit", "a reference that exists", text, remedy)
    return Exact(functools.partial(_checkpoint, path, not hidden), hidden)


def _checkpoint(path: Path, head: bool, lengths: Optional[str], positions: Optional[int]) -> Any:
    """Load a checkpoint; one that states no number of positions gets UNSTATED."""
    try:
        return from_pretrained(path, None, positions, lengths=lengths, head=head)
    except ValueError as error:
        if "give max_positions" not in str(error) or positions is not None:
            raise
        return from_pretrained(path, None, UNSTATED, lengths=lengths, head=head)


def _named(text: str) -> Any:
    """Import package.module:name; a function without parameters is called."""
    module, _, name = text.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        remedy = "give package.module:name of a module or a function that returns one"
        raise refusal(
            "audit", "a reference that can be imported", f"{text} ({error})", remedy
        ) from None
    if isinstance(value, torch.nn.Module):
        return value
    return value() if not inspect.signature(value).parameters else value


def _of_transformers(folder: str, hidden: bool) -> Any:
    """Load a checkpoint with transformers, in float32 and with eager attention."""
    import transformers

    names = json.loads((Path(folder) / "config.json").read_text("utf-8")).get("architectures")
    name = "AutoModel" if hidden or not names else names[0]
    return getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
