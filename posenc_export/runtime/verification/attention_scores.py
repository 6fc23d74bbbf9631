"""Parts of the scores of attention, and its softmax, in float64.

Shapes: H heads, S tokens of a call, T keys, R rows of a table.
"""

import numpy as np

NEIGHBOURS = 16  # of a distance between two keys of distances, on each side
# Weights of products with them: a sinc under a Kaiser window.
_AWAY = np.arange(NEIGHBOURS) + 0.5
INTERPOLATION = np.sinc(_AWAY) * np.i0(18 * np.sqrt(1 - (_AWAY / NEIGHBOURS) ** 2)) / np.i0(18)


def visible(count: int, total: int, window: int) -> np.ndarray:
    """Return which tokens [S,T] the last S tokens attend to: up to themselves, within a window."""
    at, ends = np.arange(total), np.arange(total - count, total)[:, None]
    seen: np.ndarray = (at <= ends) & (at > ends - (window if window > 0 else total + 1))
    return seen


def softmax(scores: np.ndarray, sinks: float | np.ndarray = -np.inf) -> np.ndarray:
    """Return the weights of scores [heads,S,T]; scores of sinks [heads,1,1] take a part."""
    largest = np.maximum(scores.max(axis=2, keepdims=True), sinks)
    weights = np.exp(scores - largest)
    return np.asarray(weights / (weights.sum(axis=2, keepdims=True) + np.exp(sinks - largest)))


def sums_between(decays: np.ndarray, count: int, total: int) -> np.ndarray:
    """Return the sums [H,S,T] of the decays of keys [H,T] after each key, up to each of the last S
    tokens.
    """
    sums = decays[:, :total].astype(np.float64).cumsum(1)
    return np.asarray(sums[:, total - count :, None] - sums[:, None])


def at_counts(rows: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Return rows [H,S,R] between their entries at the counts of keys: the sums of the sigmoids of
    their products [H,S,T] and those of all later keys, at most R - 1.
    """
    gates, last = 1 / (1 + np.exp(-products)), rows.shape[2] - 1
    counts = np.minimum(gates[..., ::-1].cumsum(2)[..., ::-1], last)
    below = counts.astype(int)
    low, high = (
        np.take_along_axis(rows, np.minimum(index, last), 2).astype(np.float64)
        for index in (below, below + 1)
    )
    return np.asarray(low + (counts - below) * (high - low))


def in_pieces(x: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Return functions [H,S,T] of numbers x [S,T] that are linear in pieces [H,pieces,3], each with
    its least number, slope and value at 0.
    """
    index = [np.searchsorted(of_head[1:, 0], x, "right") for of_head in pieces]
    return np.stack([p[i, 1] * x + p[i, 2] for p, i in zip(pieces, index, strict=True)])


def with_between(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return products [...,n] with keys of every second distance and, in turn, those of distances
    between two keys: sums of 2 NEIGHBOURS products with weights, from the nearest on. Without keys
    that have fewer neighbours.
    """
    count = products.shape[-1] - 2 * NEIGHBOURS + 1
    parts = [products[..., n : n + count] for n in range(2 * NEIGHBOURS)]
    pairs = zip(parts[NEIGHBOURS - 1 :: -1], parts[NEIGHBOURS:], weights, strict=True)
    between = sum(weight * (before + after) for before, after, weight in pairs)
    return np.stack((parts[NEIGHBOURS - 1], between), -1).reshape(*products.shape[:-1], -1)
