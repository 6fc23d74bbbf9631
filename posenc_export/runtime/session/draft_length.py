"""How many tokens to draft, from measured costs of passes and from how often drafts were right."""

import math
import statistics
from collections import deque
from typing import Deque, Dict, Optional, Sequence, Tuple

from posenc_export.runtime.session.drafts import LIKELY

# Numbers of drafted tokens that are tried: with the token before them, passes of 2, 4, 8 and 16.
COUNTS = (1, 3, 7, 15)
GROWTH = 0.06  # cost of a further token, relative to a pass of one, until it is measured
SAMPLES = 5  # latest times of a pass whose median is its cost
FORGET = 256  # passes after which the costs of larger passes are measured again
WEIGHT = 4.0  # number of drafted tokens that the assumed probability counts for
DECAY = 0.97  # weight of earlier drafted tokens, per token
SKIPPED = 128  # passes without a draft after which the probability of a model is estimated anew
GAIN = 1.03  # least expected number of tokens per time, relative to steps without drafts


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
        """Return the cost of a pass relative to one of a token of each row, or a guess."""
        rows, times = len(widths), self._times.get(tuple(sorted(widths)))
        if not times or (1,) * rows not in self._times:
            return (rows if self._separate else 1) + GROWTH * (sum(widths) - rows)
        # The first times may include the allocation of memory.
        return (statistics.median(times) if len(times) >= 3 else min(times)) / self.step(rows)


class Acceptance:
    """Estimated probability that a drafted token is right, by its source, a key of LIKELY."""

    def __init__(self) -> None:
        self._right = {source: WEIGHT * likely for source, likely in LIKELY.items()}
        self._tried = dict.fromkeys(LIKELY, WEIGHT)
        self._skipped = 0

    def record(self, source: int, right: int, tried: int) -> None:
        """Record that of `tried` drafted tokens, the first `right` were right."""
        decay = DECAY**tried
        self._right[source] = decay * self._right[source] + right
        self._tried[source] = decay * self._tried[source] + tried

    def skip(self, source: int) -> None:
        """Record that nothing was drafted, so that no token could be compared."""
        self._skipped += 1
        if self._skipped >= SKIPPED:
            self._right[source], self._tried[source] = WEIGHT * LIKELY[source], WEIGHT
            self._skipped = 0

    def tokens(self, source: Optional[int], count: int) -> float:
        """Return the expected number of tokens of a pass with `count` drafted ones (Leviathan et
        al. 2023, equation 1); 1 without a source.
        """
        if source is None:
            return 1.0
        probability = min(self._right[source] / self._tried[source], 0.99)
        return (1 - probability ** (count + 1)) / (1 - probability)


def best_count(
    costs: PassCosts,
    acceptance: Acceptance,
    sources: Sequence[Optional[int]],
    most: Sequence[int],
    per_token: float,
) -> int:
    """Return the number of tokens to draft for each row that can draft, with the most expected
    tokens per time; 0 if no draft gains.

    Args:
        sources: source of the draft of each row; None for a row without one.
        most: largest number of drafted tokens of each row.
        per_token: time of drafting a token for all rows, relative to a pass of one token of each.
    """
    best, rate = 0, GAIN
    for count in COUNTS:
        counts = [
            0 if source is None else min(count, limit)
            for source, limit in zip(sources, most, strict=True)
        ]
        if count > max(counts, default=0):
            break
        tokens = sum(map(acceptance.tokens, sources, counts)) / len(counts)
        gained = tokens / (costs.relative([drafted + 1 for drafted in counts]) + per_token * count)
        if gained > rate:
            best, rate = count, gained
    return best
