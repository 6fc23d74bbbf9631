"""Choose the next token from logits."""

import numpy as np


def choose(logits: np.ndarray, temperature: float, top_k: int, top_p: float, random: "np.random.Generator") -> np.ndarray:
    """Choose token ids [B] int64 from logits [B,V]: the largest logit at temperature 0, otherwise a float64 sample. Ties go to the lower id.

    Args:
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities sum to at least p (nucleus sampling, Holtzman et al. 2019); 1 keeps all.

    Raises:
        ValueError: an argument is outside its range.
    """
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"sampling: expected temperature and top_k of at least 0 and top_p in (0, 1], got {temperature}, {top_k}, {top_p}")
    if temperature == 0:
        return logits.argmax(-1).astype(np.int64)
    return np.array([_draw(row.astype(np.float64) / temperature, top_k, top_p, random) for row in logits], np.int64)


def _draw(scores: np.ndarray, top_k: int, top_p: float, random: "np.random.Generator") -> int:
    order = np.argsort(-scores, kind="stable")[: top_k or None]
    shares = np.exp(scores[order] - scores[order[0]])
    shares /= shares.sum()
    kept = int(np.searchsorted(np.cumsum(shares), top_p)) + 1  # the set includes the token with which the sum reaches p
    shares = shares[:kept] / shares[:kept].sum()
    return int(order[min(int(np.searchsorted(np.cumsum(shares), random.random(), side="right")), len(shares) - 1)])
