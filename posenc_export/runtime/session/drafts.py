"""Drafts for speculative decoding, and how many tokens to draft, from measured costs of passes."""

import math
import statistics
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.session.stepper import WIDEST

SIZES = (8, 4, 2)  # tokens of an n-gram that a look-up searches, the most reliable first
DRAFTED = 0  # stands for a draft of another model, where others are the size of an n-gram
# Probability that a drafted token is right, assumed before any is seen.
LIKELY = {8: 0.85, 4: 0.6, 2: 0.25, DRAFTED: 0.7}
# The token that would be chosen from logits [V] as the n-th next token of the row, from 0.
Guess = Callable[[int, np.ndarray], int]
# Numbers of drafted tokens that are tried: with the token before them, passes of 2, 4, 8 and 16.
COUNTS = (1, 3, 7, 15)
GROWTH = 0.06  # cost of a further token, relative to a pass of one, until it is measured
SAMPLES = 5  # latest times of a pass whose median is its cost
FORGET = 256  # passes after which the costs of larger passes are measured again
WEIGHT = 4.0  # number of drafted tokens that the assumed probability counts for
DECAY = 0.97  # weight of earlier drafted tokens, per token
SKIPPED = 128  # passes without a draft after which the probability of a model is estimated anew
GAIN = 1.03  # least expected number of tokens per time, relative to steps without drafts


def common(text: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both texts begin."""
    for index, (token, other_token) in enumerate(zip(text, other, strict=False)):
        if token != other_token:
            return index
    return min(len(text), len(other))


def keep(session: Any, cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Take back what the cache of the only row, with the ids `cached`, holds beyond the beginning
    of a prompt, and at least its last token. Return the number of tokens that are left.
    """
    equal = common(cached, prompt[:-1])
    try:
        session.rewind(len(cached) - equal)
    except ValueError:  # a state that each call replaces keeps a limited history
        session.reset()
        equal = 0
    return equal


class Lookup:
    """The continuation of the last earlier occurrence of the latest tokens (Saxena 2023, Prompt
    Lookup Decoding), of the longest n-gram of SIZES that occurs in the text of the row.
    """

    free = True  # whether a draft costs no time that is worth counting

    def __init__(self, text: Sequence[int]) -> None:
        self._text: List[int] = []
        # By n-gram: index of the token after its last occurrence.
        self._following: Dict[Tuple[int, ...], int] = {}
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text of the row."""
        text = self._text
        for token in tokens:
            for size in SIZES:  # the n-grams that end before this token
                if len(text) >= size:
                    self._following[tuple(text[-size:])] = len(text)
            text.append(int(token))

    def propose(self, count: int, guess: Guess) -> Tuple[List[int], int]:
        """Return at most `count` tokens that may follow, and their source, a key of LIKELY."""
        text = self._text
        for size in SIZES:
            begin = self._following.get(tuple(text[-size:])) if len(text) >= size else None
            if begin is not None:
                period = len(text) - begin  # past its end, the text is taken to repeat
                return [text[begin + index % period] for index in range(count)], size
        return [], SIZES[-1]


class DraftModel:
    """The tokens that another decoder of the same vocabulary generates in a session of its own."""

    free = False

    def __init__(self, session: Any, text: Sequence[int]) -> None:
        self._session = session
        self._text = [int(token) for token in text]
        self._read: List[int] = []  # tokens in the cache of the session

    def extend(self, tokens: Sequence[int]) -> None:
        self._text += [int(token) for token in tokens]

    def propose(self, count: int, guess: Guess) -> Tuple[List[int], int]:
        text, session = self._text, self._session
        count = min(count, session.manifest.max_positions - len(text))
        if count < 1:
            return [], DRAFTED
        same = keep(session, self._read, text)
        self._read = text[:same]
        unread = text[same:]
        drafted: List[int] = []
        while True:
            if len(unread) == 1 and same:
                logits = session.step(np.array(unread), copy=False)[0]
            else:  # a pass of few tokens has a binding that gives all logits
                last = 1 if len(unread) > WIDEST else None
                logits = session.prefill(np.array([unread]), logits_to_keep=last)[0, -1]
            self._read += unread
            same = len(self._read)
            drafted.append(guess(len(drafted), logits))
            if len(drafted) == count:
                return drafted, DRAFTED
            unread = drafted[-1:]


Drafts = Union[Lookup, DraftModel]  # of the tokens of one row


class PassCosts:
    """Measured times of passes in seconds, by the number of tokens of each row. separate: whether
    rows that read several tokens are read one after the other.
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
    tokens per time; 0 if no draft gains. sources, most: of each row, None without a draft, and its
    most tokens. per_token: time of drafting a token for all rows, relative to a pass of one token
    of each.
    """
    best, rate = 0, GAIN
    for count in COUNTS:
        limits = zip(sources, most, strict=True)
        counts = [0 if source is None else min(count, limit) for source, limit in limits]
        if count > max(counts, default=0):
            break
        tokens = sum(map(acceptance.tokens, sources, counts)) / len(counts)
        gained = tokens / (costs.relative([drafted + 1 for drafted in counts]) + per_token * count)
        if gained > rate:
            best, rate = count, gained
    return best
