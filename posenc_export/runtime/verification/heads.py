"""Attention in float64, which the checks of attention nodes compare with.

Shapes: S new tokens, T keys, D head size.
"""

from dataclasses import dataclass

import numpy as np

from posenc_export.runtime.verification.contracts import UNIT


@dataclass(frozen=True)
class Heads:
    """Numbers of heads [heads,S,D] float64, and bounds of the error of a kernel's numbers."""

    numbers: np.ndarray
    error: np.ndarray

    @staticmethod
    def of_tokens(numbers: np.ndarray) -> "Heads":
        """Return exact numbers [S,heads,D] by head."""
        by_head = numbers.transpose(1, 0, 2).astype(np.float64)
        return Heads(by_head, np.zeros_like(by_head))

    def rotated(self, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> "Heads":
        """Rotate the first channels by angles [S,n/2]; each number is a sum with 3 roundings."""
        size = 2 * cos.shape[1]
        first = slice(0, size, 2) if interleaved else slice(0, size // 2)
        second = slice(1, size, 2) if interleaved else slice(size // 2, size)
        a, b = self.numbers[..., first], self.numbers[..., second]
        numbers, error = self.numbers.copy(), self.error.copy()
        numbers[..., first], numbers[..., second] = a * cos - b * sin, a * sin + b * cos
        error[..., first] = 3 * UNIT * (np.abs(a * cos) + np.abs(b * sin))
        error[..., second] = 3 * UNIT * (np.abs(a * sin) + np.abs(b * cos))
        return Heads(numbers, error)


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


def by_query_head(part: np.ndarray, heads: int) -> np.ndarray:
    """Repeat keys or values [K,T,D] for each of the query heads that share them."""
    return np.repeat(part, heads // len(part), axis=0)  # [heads,T,D]


def by_token(part: np.ndarray) -> np.ndarray:
    """Return numbers of heads [heads,S,D] as [S,heads*D]."""
    return part.transpose(1, 0, 2).reshape(part.shape[1], -1)
