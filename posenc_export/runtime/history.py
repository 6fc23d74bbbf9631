"""What a session with states that every call replaces must remember to rewind: their values before each call, and the tokens of the call."""

from dataclasses import dataclass
from typing import List, Sequence, Tuple

import numpy as np


@dataclass(frozen=True)
class Call:
    """One call of a graph.

    Args:
        length: tokens each row held before it [B].
        states: values before it, of the states that calls replace.
        rows: new tokens of each row [count] or [count,E].
    """

    length: np.ndarray
    states: Sequence[np.ndarray]
    rows: Sequence[np.ndarray]


class History:
    """The calls of one session, oldest first. Memory: the inputs, and one set of states a call."""

    def __init__(self) -> None:
        self.calls: List[Call] = []

    def record(self, length: np.ndarray, states: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> None:
        """Remember a call that is about to happen."""
        self.calls.append(Call(length.copy(), states, [row.copy() for row in rows]))

    def back_to(self, target: np.ndarray) -> Tuple[np.ndarray, Sequence[np.ndarray], List[np.ndarray]]:
        """Forget calls until no row held more than target [B]: lengths and states then, and the tokens [count,*] each row must be fed again."""
        again: List[List[np.ndarray]] = [[] for _ in target]
        while True:
            call = self.calls.pop()
            for row, part in enumerate(call.rows):
                again[row].insert(0, part)
            if (call.length <= target).all():
                kept = [np.concatenate(parts)[: target[row] - call.length[row]] for row, parts in enumerate(again)]
                return call.length, call.states, kept

    def copy(self) -> "History":
        """The same past, for a fork."""
        other = History()
        other.calls = list(self.calls)
        return other
