"""Products of queries with keys that CachedAttention rotates further for each query, in float64."""

from dataclasses import dataclass
from typing import Tuple

import numpy as np

from posenc_export.runtime.verification.contracts import UNIT

DIGITS = 16  # numbers of a digit of a distance (packages/kernels/README.md)


def of_digits(angles: np.ndarray, digits: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return the inputs turn_cos and turn_sin [B,S,16*digits,r/2] for angles per slot [B,S,r/2]."""
    distances = np.outer(DIGITS ** np.arange(digits), np.arange(DIGITS)).reshape(-1, 1)
    turns = angles[:, :, None] * distances
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


@dataclass(frozen=True)
class Turns:
    """Angles of each query: those of the distances d 16^l in row d + 16 l.

    Args:
        cos, sin: [S,16*digits,r/2].
        interleaved: see ops.rotate_pairs.
    """

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool

    def at(self, distances: np.ndarray) -> np.ndarray:
        """Return the rotations [S,T,r/2] complex at distances [S,T], as products over digits."""
        rows = self.cos + 1j * self.sin.astype(np.float64)
        queries, result = np.arange(len(rows))[:, None], np.ones(1)
        for first in range(0, rows.shape[1], DIGITS):
            digit = distances // DIGITS ** (first // DIGITS) % DIGITS
            result = result * rows[queries, first + digit]
        return result

    def products(self, q: np.ndarray, keys: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return the products [H,S,T] of queries [H,S,D] with keys [H,T,D], of which the last are
        their own, and bounds of their errors: D roundings of the sum, and 3 of each rotation of a
        number, of which a query has one for each digit and a key one.
        """
        count, total = q.shape[1], keys.shape[1]
        ends = np.arange(total - count, total)[:, None]
        rotations = self.at(np.maximum(ends - np.arange(total), 0))
        of_q, of_keys = self._pairs(q), self._pairs(keys)
        plain = 2 * rotations.shape[2]
        y = q[..., plain:] @ keys[..., plain:].transpose(0, 2, 1)
        for query in range(count):
            turned = of_q[:, query, None] * rotations[query]
            y[:, query] += (turned.conj() * of_keys).real.sum(2)
        roundings = q.shape[2] + 3 * (self.cos.shape[1] // DIGITS + 1)
        return y, roundings * UNIT * (np.abs(of_q) @ np.abs(of_keys).transpose(0, 2, 1))

    def _pairs(self, x: np.ndarray) -> np.ndarray:
        """Return the rotated pairs of heads [..,D] as complex numbers [..,r/2]."""
        half = self.cos.shape[2]
        if self.interleaved:
            return np.asarray(x[..., : 2 * half : 2] + 1j * x[..., 1 : 2 * half : 2])
        return np.asarray(x[..., :half] + 1j * x[..., half : 2 * half])
