"""References of others: modules of torch and functions.

Shapes: as in facts.py.
"""

import inspect
from typing import Any, Callable, Mapping, Tuple

import numpy as np
import torch

from posenc_export.auditing.facts import UNSTATED, Facts
from posenc_export.export.comparison import first_output
from posenc_export.models.by_transformers import LENGTHS, limits_of
from posenc_export.shared.foreign import explained
from posenc_export.shared.numerics import tolerance, worst_error
from posenc_export.shared.refusal import refusal

ORIGINAL = "original_max_position_embeddings"
MODEL = "give the model of this graph"
BY_LENGTH = ("longrope", "dynamic")  # rotations whose angles depend on the length of a sequence


class Called:
    """A torch.nn.Module or a function, called with whole sequences as transformers calls one.

    Args:
        module: takes input_ids or the like first, and attention_mask and position_ids if its
            forward names them; returns a tensor [B,L,V], a tuple that begins with one, or an object
            with logits or last_hidden_state.
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
        positions = _size(config, *LENGTHS) or UNSTATED
        depth = _size(config, "num_hidden_layers") or 2
        weights = list(getattr(self.module, "parameters", list)())
        longest = max((p.shape[-1] for p in weights if p.dim() > 1), default=64)
        rounding = tolerance("float32", depth, longest)
        tokens: np.ndarray = np.ones((1, 6, features), np.float32)
        if self.vocabulary:
            tokens = np.arange(6)[None] % self.vocabulary
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
            heads=_heads(config),
            starts="position_ids" in self.names[1:],
        )

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """As Reference.outputs. Raise ValueError for a module that does not compute them."""
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
        rule = f"a reference that returns numbers [{rows},{length},V] for {key}"
        with torch.no_grad(), explained(f"audit: expected {rule}", MODEL):
            value = self.module(*arguments, **named, **({} if arguments else {key: first}))
            outputs = np.asarray(first_output(value).detach().float().cpu().numpy())
        if outputs.ndim != 3 or outputs.shape[:2] != (rows, length) or not outputs.size:
            raise refusal("audit", rule, list(outputs.shape), MODEL)
        return outputs

    def changed(self, change: Callable[[Any], Any]) -> "Called":
        """As Reference.changed."""
        return Called(change(self.module), self.vocabulary, self.facts.features)


def _heads(config: Any) -> Tuple[int, int]:
    heads = _size(config, "num_attention_heads")
    size = _size(config, "head_dim") or _size(config, "hidden_size") // (heads or 1)
    return _size(config, "num_key_value_heads") or heads, size


def _rotation(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _size(config: Any, *names: str) -> int:
    """Return the first size that a config or its rotation has; 0 for none."""
    sizes = [getattr(config, name, None) or _rotation(config).get(name) for name in names]
    return next((size for size in sizes if isinstance(size, int)), 0)
