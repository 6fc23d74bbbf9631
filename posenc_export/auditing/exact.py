"""References of this package: exact models and artefacts.

Shapes: as in facts.py.
"""

import copy
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import msgspec
import numpy as np
import torch

from posenc_export.auditing.facts import Facts
from posenc_export.export import bounds, expected
from posenc_export.export.conditioning import disturbed
from posenc_export.export.edges import edges_of
from posenc_export.models import stack, user_module
from posenc_export.runtime import load
from posenc_export.runtime.session.session import Session
from posenc_export.shared.numerics import tolerance
from posenc_export.shared.refusal import refusal

BY_LENGTH = ("rope_dynamic", "rope_longrope")  # angles depend on the length of the sequence


class Exact:
    """A model of this package. build: returns it, given `lengths` and `max_positions` of
    from_pretrained. hidden: whether the output is the hidden states, for a model with a head.
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
        return without_head(model) if self.hidden and isinstance(model, stack.Stack) else model

    def _facts(self) -> Facts:
        model = self.model
        described = expected.eager_session(model, 8).manifest
        edges = {edge.name: edge.at for edge in edges_of(model)}
        attentions = user_module.inner_of(model).config.attentions
        sizes = {attention.sees.get("size", 0) for attention in attentions}
        specs = [spec for attention in attentions for spec in attention.encodings]
        by_length = [spec for spec in specs if spec["name"] in BY_LENGTH]
        originals = [spec["original_max_positions"] for spec in by_length]
        config: Any = user_module.inner_of(model).config
        of_tokens = getattr(config, "tokens", config).encodings
        places = (of_tokens, *(attention.encodings for attention in attentions))
        self.encodings = {spec["name"] for specs in places for spec in specs}
        depth, reduction = bounds.extent(model)
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
            heads=(attentions[0].kv_heads, attentions[0].head_size),
            window=sizes.pop() if len(sizes) == 1 else 0,
            starts=any_start(config),
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
            self._sessions[key] = expected.eager_session(model, min(capacity, self.facts.positions))
        return expected.full_pass(self._sessions[key], tokens, start, None)

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
            starts=any_start(manifest.config),
        )

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """As Reference.outputs."""
        self.session.reset()
        return self.session.prefill(tokens, start=start, chunk=tokens.shape[1])

    def disturbed(self, seed: int) -> None:
        """As Reference.disturbed."""


def any_start(config: Any) -> bool:
    """Return whether the outputs of sequences that begin at other positions are those of
    transformers, which counts the positions of chunks and of a rounded bias in the mask, not in
    position_ids. config: of a model, or the same in a manifest.
    """
    text = msgspec.json.encode(config)
    return b'"name":"chunk"' not in text and b'"numerics":"bfloat16"' not in text


def without_head(model: stack.Stack) -> stack.Stack:
    """Return the model without its head, sharing all weights."""
    bare = copy.copy(model)
    bare._modules = dict(model._modules)
    bare.config = msgspec.structs.replace(model.config, head=None)
    bare.head = torch.nn.Identity()
    return bare
