"""Choose the next token from logits."""

import math
from typing import Any

import numpy as np

from posenc_export.runtime.session.arguments import at_least, short_repr


def choose(logits: np.ndarray, temperature: float, top_k: int, top_p: float, random: "np.random.Generator") -> np.ndarray:
    """Choose token ids [B] int64 from logits [B,V]: the largest logit at temperature 0, otherwise a float64 sample. Ties go to the lower id.

    Args:
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities sum to at least p (nucleus sampling, Holtzman et al. 2019); 1 keeps all.

    Raises:
        ValueError: an argument is outside its range.
    """
    check(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1).astype(np.int64)
    return np.array([_draw(row.astype(np.float64), temperature, top_k, top_p, random) for row in logits], np.int64)


def check(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Raise ValueError if an argument of `choose` is outside its range."""
    if not (_is_number(temperature) and 0 <= temperature < math.inf):
        raise ValueError(f"session: expected temperature to be a finite number of at least 0, got {short_repr(temperature)}; 0 chooses the most probable token")
    at_least("top_k", top_k, 0)
    if not (_is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"session: expected top_p to be a number above 0 and at most 1, got {short_repr(top_p)}; 1 keeps all tokens")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _draw(scores: np.ndarray, temperature: float, top_k: int, top_p: float, random: "np.random.Generator") -> int:
    order = np.argsort(-scores, kind="stable")[: top_k or None]
    with np.errstate(over="ignore"):  # near temperature 0, all differences but that of the largest logit are infinite
        shares = np.exp((scores[order] - scores[order[0]]) / temperature)
    shares /= shares.sum()
    kept = int(np.searchsorted(np.cumsum(shares), top_p)) + 1  # the set includes the token with which the sum reaches p
    shares = shares[:kept] / shares[:kept].sum()
    return int(order[min(int(np.searchsorted(np.cumsum(shares), random.random(), side="right")), len(shares) - 1)])
