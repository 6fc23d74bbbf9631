"""References of others: modules of torch, functions, and checkpoints that transformers loads.

Shapes: as in facts.py.
"""

import importlib
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import torch

from posenc_export.auditing.facts import UNSTATED, Facts
from posenc_export.export.conditioning import disturbed
from posenc_export.shared.numerics import tolerance
from posenc_export.shared.refusal import refusal

# Names of a config's sizes, by what they mean here.
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
EDGES = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
FIELDS = ("logits", "last_hidden_state", "output")


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


def named(text: str) -> Any:
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


def of_transformers(folder: str, hidden: bool) -> Any:
    """Load a checkpoint with transformers, in float32 and with eager attention."""
    import transformers

    names = json.loads((Path(folder) / "config.json").read_text("utf-8")).get("architectures")
    name = "AutoModel" if hidden or not names else names[0]
    return getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
