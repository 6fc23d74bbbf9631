"""How many tokens to draft: from the measured cost of passes of several tokens, and from how
often drafted tokens were right.
"""

import math
import statistics
from collections import deque
from typing import Deque, Dict, Optional, Sequence, Tuple

from posenc_export.runtime.session.drafts import LIKELY

COUNTS = (
    1,
    3,
    7,
    15,
)  # numbers of drafted tokens that are tried: with the token before them, passes of 2, 4, 8 and 16
# Assumed cost of a further token in a pass, relative to a pass of one, until a pass of this size is
# measured.
GROWTH = 0.06
SAMPLES = 5  # latest times of a pass whose median is its cost
FORGET = 256  # passes after which the costs of larger passes are measured again
WEIGHT = 4.0  # number of drafted tokens that the assumed probability counts for
DECAY = 0.97  # weight of earlier drafted tokens, per token
SKIPPED = (
    128  # passes without a draft of a draft model after which its probability is estimated anew
)
# Expected number of tokens per time, relative to steps without drafts, from which a draft is worth
# it.
GAIN = 1.03


class PassCosts:
    """Measured times of passes in seconds, by the number of tokens of each row.

    Args:
        separate: whether rows that read several tokens are read one after the other.
    """

    def __init__(self, separate: bool) -> None:
        self._separate = separate
        self._times: Dict[Tuple[int, ...], Deque[float]] = {}
        self._since = 0

    def record(self, widths: Sequence[int], seconds: float) -> None:
        """Record the time of a pass that read `widths` tokens of each row."""
        self._since += 1
        if self._since > FORGET:
            self._times = {key: times for key, times in self._times.items() if max(key) == 1}
            self._since = 0
        self._times.setdefault(tuple(sorted(widths)), deque(maxlen=SAMPLES)).append(seconds)

    def step(self, rows: int) -> float:
        """Return the time of a pass of one token of each row; infinite before the first."""
        times = self._times.get((1,) * rows)
        return statistics.median(times) if times else math.inf

    def relative(self, widths: Sequence[int]) -> float:
        """Return the cost of a pass relative to one of a token of each row. Until it is
        measured, an optimistic guess, which leads to a measurement.
        """
        rows, times = len(widths), self._times.get(tuple(sorted(widths)))
        if not times or (1,) * rows not in self._times:
            return (rows if self._separate else 1) + GROWTH * (sum(widths) - rows)
        # The first times may include the allocation of memory.
        return (statistics.median(times) if len(times) >= 3 else min(times)) / self.step(rows)


class Acceptance:
    """Estimated probability that a drafted token is right, by how it was found."""

    def __init__(self) -> None:
        self._right = {found: WEIGHT * likely for found, likely in LIKELY.items()}
        self._tried = dict.fromkeys(LIKELY, WEIGHT)
        self._skipped = 0

    def record(self, found: int, right: int, tried: int) -> None:
        """Record that of `tried` drafted tokens, the first `right` were right."""
        decay = DECAY**tried
        self._right[found] = decay * self._right[found] + right
        self._tried[found] = decay * self._tried[found] + tried

    def skip(self, found: int) -> None:
        """Record that nothing was drafted, so that no token could be compared."""
        self._skipped += 1
        if self._skipped >= SKIPPED:
            self._right[found], self._tried[found], self._skipped = (
                WEIGHT * LIKELY[found],
                WEIGHT,
                0,
            )

    def tokens(self, found: int, count: int) -> float:
        """Return the expected number of tokens of a pass with `count` drafted ones (Leviathan et
        al. 2023, equation 1).
        """
        probability = min(self._right[found] / self._tried[found], 0.99)
        return (1 - probability ** (count + 1)) / (1 - probability)


def best_count(
    costs: PassCosts,
    acceptance: Acceptance,
    found: Sequence[Optional[int]],
    most: Sequence[int],
    per_token: float,
) -> int:
    """Return the number of tokens to draft for each row that can draft, with the most expected
    tokens per time; 0 if no draft gains.

    Args:
        found: how the draft of each row is found; None for a row without one.
        most: largest number of drafted tokens of each row.
        per_token: time of drafting a token for all rows, relative to a pass of one token of each
            row.
    """
    best, rate = 0, GAIN
    for count in COUNTS:
        counts = [
            0 if how is None else min(count, limit) for how, limit in zip(found, most, strict=True)
        ]
        if count > max(counts, default=0):
            break
        tokens = sum(
            1.0 if how is None else acceptance.tokens(how, drafted)
            for how, drafted in zip(found, counts, strict=True)
        ) / len(counts)
        gained = tokens / (costs.relative([drafted + 1 for drafted in counts]) + per_token * count)
        if gained > rate:
            best, rate = count, gained
    return best
