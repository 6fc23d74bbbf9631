"""Tokens that generation_config.json forbids or forces, applied as transformers does."""

import math
from typing import Optional, Sequence, Union

import numpy as np

from posenc_export.runtime.artefact.records import Generation


class TokenRules:
    """The rules for tokens after prompts of `lengths` tokens [B], from those of the artefact."""

    def __init__(self, known: Optional[Generation], lengths: np.ndarray) -> None:
        self._known = known
        forces = known is not None and known.forced_first is not None
        self._forced = (lengths == 1) & forces  # rows whose first token is forced

    def applied(
        self, logits: np.ndarray, index: int, rows: Union[slice, Sequence[int]] = slice(None)
    ) -> np.ndarray:
        """Return logits [n,V] of some rows, after `index` tokens, with -inf for forbidden ones."""
        known = self._known
        if known is None:
            return logits
        logits, forced = logits.copy(), self._forced[rows]
        if index == 0 and forced.any():
            logits[forced] = -math.inf
            logits[forced, known.forced_first] = 0.0
        logits[:, list(known.suppressed)] = -math.inf
        if index < 2:  # rows whose first token that is not forced is this one
            logits[np.ix_(forced == index, known.suppressed_first)] = -math.inf
        return logits
