"""How much of the prompts is read between two steps, so that running rows wait for a time that follows their own steps."""

from typing import Tuple

STALL = 1.25  # time of reading between two steps, in steps
LEAST, FIRST = 8, 32  # smallest number of tokens that are read, and the number before anything was measured


class Pace:
    """Chooses the number of prompt tokens between two steps from the measured times of reading and of steps.

    Args:
        most: largest number of tokens.
    """

    def __init__(self, most: int) -> None:
        self.most, self.size = most, min(FIRST, most)
        self.step = 0.0  # seconds of a step, the mean of the last ones; 0 before the first one

    def room(self, waits: bool) -> Tuple[int, float]:
        """Return the number of tokens to read, and the seconds in which to begin another row. `waits`: whether a row waits for its next token."""
        return (self.size, STALL * self.step) if waits else (self.most, float("inf"))

    def stepped(self, seconds: float) -> None:
        """Count a step."""
        self.step = (self.step + seconds) / 2 if self.step else seconds

    def read(self, tokens: int, seconds: float) -> None:
        """Count a call that has read `tokens` tokens of a prompt. Calls that were shorter only because their prompt was do not count."""
        limit = STALL * self.step
        if limit and (tokens >= self.size or seconds > limit):
            wanted = min(max(int(tokens * limit / max(seconds, 1e-9)), self.size // 2), 2 * self.size)
            self.size = min(max(wanted, LEAST), self.most)
