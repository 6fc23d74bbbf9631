"""Progress of a phase with a known number of steps."""

import time
from typing import Callable

EVERY = 0.5  # seconds between two lines at least
Progress = Callable[[str], None]  # takes one line of text


def silent(line: str) -> None:
    """Report no progress."""


class Step(str):
    """A line about a step within a phase, which a terminal replaces by the next."""


class Steps:
    """Report how many of `total` steps of a phase are done, and the remaining time at the mean
    speed so far. say: called with a Step, at most once in EVERY seconds. what: what a step is, in
    the plural.
    """

    def __init__(self, say: Progress, phase: str, total: int, what: str) -> None:
        self._say, self._phase, self._total, self._what = say, phase, total, what
        self._start = self._said = time.monotonic()
        self._done = 0

    def advance(self, done: int | None = None) -> None:
        """Count one more step, or set the number of steps that are done."""
        self._done = self._done + 1 if done is None else done
        now = time.monotonic()
        if self._done and now - self._said >= EVERY:
            self._said = now
            remaining = (now - self._start) * (self._total - self._done) / self._done
            counted = f"{self._done} of {self._total} {self._what}"
            self._say(Step(f"{self._phase}: {counted}, {remaining:.0f} s left"))
