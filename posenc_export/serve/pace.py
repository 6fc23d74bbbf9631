"""How much of the prompts is read between two steps, so that running rows wait a short time."""

import math
from typing import Callable

STALL = 1.25  # time of reading between two steps, in steps
LEAST, FIRST = 4, 16  # fewest tokens that are read; their number before anything was measured
# Cached tokens to which the attention of a token takes about as long as its weights: measured with
# models of 11 M and 135 M weights.
DEPTH = 2048


class Pace:
    """Chooses the number of prompt tokens between two steps, at most `most`, from the times of
    reading and of steps in seconds of `clock`.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self.most, self.clock = most, clock
        self.size = min(FIRST, most)  # tokens that a turn reads at the beginning of a prompt
        self.step = 0.0  # seconds of a step, the mean of the last ones; 0 before the first one
        self.begin(False)

    def begin(self, waits: bool) -> None:
        """Begin a turn. `waits`: whether a row waits for its next token."""
        self._waits, self._left = waits, float(self.size if waits else self.most)
        self._until = STALL * self.step if waits else math.inf
        self._spent = self._last = 0.0

    def count(self, offset: int) -> int:
        """Return how many tokens the turn may still read after `offset` cached ones; 0 to end."""
        if self._left < 1 or (self._spent and self._spent + self._last > self._until):
            return 0
        count = int(self._left / (_weight(offset) if self._waits else 1.0))
        return min(max(count, LEAST), self.most)

    def read(self, tokens: int, offset: int, seconds: float) -> None:
        """Count a call that has read tokens after `offset` cached ones. Calls that were shorter
        only because their prompt was say nothing about longer ones.
        """
        weight, limit = _weight(offset), STALL * self.step
        self._left -= tokens * (weight if self._waits else 1.0)
        self._spent, self._last = self._spent + seconds, seconds
        if limit and (tokens >= int(self.size / weight) or seconds > limit):
            wanted = max(int(tokens * weight * limit / max(seconds, 1e-9)), self.size // 2)
            self.size = min(max(min(wanted, 2 * self.size), LEAST), self.most)

    def stepped(self, seconds: float) -> None:
        """Count a step."""
        self.step = (self.step + seconds) / 2 if self.step else seconds


def _weight(offset: int) -> float:
    """Return the time of a token after `offset` cached ones, relative to one at the beginning."""
    return 1 + offset / DEPTH
