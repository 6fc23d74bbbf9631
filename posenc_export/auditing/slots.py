"""What a session on a graph of others keeps of its calls, and how slots of caches are moved.

Shapes: B batch, S new tokens, P past slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from posenc_export.auditing.graph import Arrays
from posenc_export.auditing.inputs import Cache

TAGS = 3  # numbers behind each output: row, index of the token in it, number of the call
NONE = -1  # no call: the caches are empty, or their slots were moved


@dataclass(frozen=True)
class Call:
    """One run of a graph. Arrays have one number for each row [B].

    Args:
        new: number of columns S.
        past: number of slots P of the cache.
        start: position of the first token of each row.
        before: number of tokens that each row had in the cache.
        padding: columns of padding before the tokens of each row, in cache and call.
        behind: columns of padding behind the new tokens of each row.
    """

    new: int
    past: int
    start: np.ndarray
    before: np.ndarray
    padding: np.ndarray
    behind: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.start)


class Feeds(NamedTuple):
    """Inputs of a run, its columns without padding [B,S], and the call of its caches, or NONE."""

    inputs: Arrays
    caches: Arrays
    source: int
    valid: np.ndarray


def taken(cache: Cache, array: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the slots [B,P] of each row."""
    moved = np.moveaxis(array, (cache.rows, cache.slots), (0, 1))
    taken = moved[np.arange(len(slots))[:, None], slots]
    return np.ascontiguousarray(np.moveaxis(taken, (0, 1), (cache.rows, cache.slots)))
