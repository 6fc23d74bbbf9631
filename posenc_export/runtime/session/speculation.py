"""Speculative decoding (Leviathan et al. 2023; Chen et al. 2023): read drafted tokens together with
the last one, and keep those that the model chooses itself. They are looked up in the text.

Every token is chosen from the logits of the model with the random number of its place, as without
drafts, and a drafted token is kept if it is the chosen one. Tokens are therefore those of plain
decoding with the same seed, whatever is drafted, up to rounding: the logits of a pass of several
tokens differ from those of steps by rounding errors, within the bound of the certificate, so that
two tokens which are that close may be exchanged. In formats that round activations these errors are
large. As a look-up is not random, this accepts as many tokens as rejection sampling: each with the
probability that the model gives it.
"""

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Deque, Dict, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.arguments import short_repr
from posenc_export.runtime.session.errors import expected

SIZES = (8, 4, 2)  # tokens of an n-gram that a look-up searches, the most reliable first
# By size, the probability that a drafted token is right, assumed before any is seen.
LIKELY = {8: 0.85, 4: 0.6, 2: 0.25}
# Numbers of drafted tokens that are tried: with the token before them, passes of 2, 4, 8 and 16.
COUNTS = (1, 3, 7, 15)
GROWTH = 0.06  # cost of a further token, relative to a pass of one, until it is measured
SAMPLES = 5  # latest times of a pass whose median is its cost
FORGET = 256  # passes after which the costs of larger passes are measured again
WEIGHT = 4.0  # number of drafted tokens that the assumed probability counts for
DECAY = 0.97  # weight of earlier drafted tokens, per token
GAIN = 1.03  # least expected number of tokens per time, relative to steps without drafts
LOOKUP = "lookup"
MOST = COUNTS[-1]  # largest number of drafted tokens
LEAST_REWIND = 4 * MOST  # a row may be that many tokens ahead of what is returned
Speculate = Optional[str]  # None or LOOKUP
# Tokens that may follow in a row, and the size of the n-gram that they follow; None without one.
Proposal = Tuple[List[int], Optional[int]]


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

    def propose(self, count: int) -> Proposal:
        """Return at most `count` tokens that may follow."""
        text = self._text
        for size in SIZES:
            begin = self._following.get(tuple(text[-size:])) if len(text) >= size else None
            if begin is not None:
                period = len(text) - begin  # past its end, the text is taken to repeat
                return [text[begin + index % period] for index in range(count)], size
        return [], None


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
    """Estimated probability that a drafted token is right, by the size of the n-gram before it."""

    def __init__(self) -> None:
        self._right = {source: WEIGHT * likely for source, likely in LIKELY.items()}
        self._tried = dict.fromkeys(LIKELY, WEIGHT)

    def record(self, source: int, right: int, tried: int) -> None:
        """Record that of `tried` drafted tokens, the first `right` were right."""
        decay = DECAY**tried
        self._right[source] = decay * self._right[source] + right
        self._tried[source] = decay * self._tried[source] + tried

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
) -> int:
    """Return the number of tokens to draft for each row that can draft, with the most expected
    tokens per time; 0 if no draft gains. sources, most: of each row, None without a draft, and its
    most tokens.
    """
    best, rate = 0, GAIN
    for count in COUNTS:
        limits = zip(sources, most, strict=True)
        counts = [0 if source is None else min(count, limit) for source, limit in limits]
        if count > max(counts, default=0):
            break
        tokens = sum(map(acceptance.tokens, sources, counts)) / len(counts)
        gained = tokens / costs.relative([drafted + 1 for drafted in counts])
        if gained > rate:
            best, rate = count, gained
    return best


@dataclass
class Reader:
    """A row that is decoded."""

    # Token chosen from logits [V], as the row's generated token of this index
    choose: Callable[[int, np.ndarray], int]
    stops: Collection[int]  # ids that end the row
    most: int  # largest number of tokens to generate
    drafts: Lookup  # drafts of the row
    unread: List[int] = field(default_factory=list)  # tokens to read before a token can be chosen
    count: int = 0  # number of tokens generated
    done: bool = False  # whether the row has ended

    def take(self, logits: np.ndarray) -> int:
        """Choose the next token, which is read by the next pass unless the row has ended."""
        token = self.choose(self.count, logits)
        self.count += 1
        self.unread = [token]
        self.done = token in self.stops or self.count >= self.most
        return token


class Speculator:
    """Reads the rows of a session that passes `check_speculate`, with drafts where they gain time.

    Attributes:
        passes, drafts, drafted, kept: number of passes, of rows that read drafted tokens in them,
            of these tokens, and of those that were kept.
    """

    def __init__(self, session: Any) -> None:
        self._session, self._acceptance = session, Acceptance()
        self.passes = self.drafts = self.drafted = self.kept = 0

    def read(self, readers: Sequence[Optional[Reader]]) -> List[List[int]]:
        """Read the unread tokens of each row, None for one that does not read, in one pass. Return
        the tokens that are chosen after them: at least one for each row that reads. Raise as
        Session.step.
        """
        proposals: List[Proposal] = [
            reader.drafts.propose(MOST) if reader else ([], None) for reader in readers
        ]
        drafts = self._drafts(readers, proposals)
        begin = time.perf_counter()
        pairs = list(zip(readers, drafts, strict=True))
        rows = [[*reader.unread, *draft] if reader else [] for reader, draft in pairs]
        lengths = {len(row) for row in rows}
        if lengths == {1}:
            outputs = self._session.step(np.array(rows)[:, 0], copy=False)[:, None]
        else:  # [B,S,V], logits of a row first
            outputs = self._session.prefill(np.array(rows) if len(lengths) == 1 else rows)
        chosen = [
            _kept(reader, draft, outputs[row, : len(rows[row])]) if reader else []
            for row, (reader, draft) in enumerate(pairs)
        ]
        both = zip(drafts, chosen, strict=True)
        back = [len(draft) + 1 - len(tokens) if draft else 0 for draft, tokens in both]
        if any(back):
            self._session.rewind(back)
        seconds = time.perf_counter() - begin
        self._session.pass_costs.record([len(row) for row in rows if row], seconds)
        for (reader, draft), proposal, tokens in zip(pairs, proposals, chosen, strict=True):
            if reader:
                self._learn(*proposal, draft, tokens)
                reader.drafts.extend(tokens)
        self.passes += 1
        return chosen

    def _drafts(
        self, readers: Sequence[Optional[Reader]], proposals: Sequence[Proposal]
    ) -> List[List[int]]:
        drafts: List[List[int]] = [[] for _ in readers]
        if all(source is None for _, source in proposals):
            return drafts
        room, costs = self._session.room.tolist(), self._session.pass_costs
        limits = [
            min(MOST, reader.most - reader.count - 1, free - len(reader.unread)) if reader else 0
            for reader, free in zip(readers, room, strict=True)
        ]
        reading = [row for row, reader in enumerate(readers) if reader]
        sources, most = [proposals[row][1] for row in reading], [limits[row] for row in reading]
        count = best_count(costs, self._acceptance, sources, most)
        for row in reading:
            drafts[row] = proposals[row][0][: max(min(count, limits[row]), 0)]
        return drafts

    def _learn(
        self, tokens: List[int], source: Optional[int], draft: List[int], chosen: List[int]
    ) -> None:
        """Compare the drafted or proposed tokens with those that were chosen."""
        if source is None:
            return
        compared = draft or tokens[:1]
        right = common(compared, chosen)
        self._acceptance.record(source, right, min(right + 1, len(compared), len(chosen)))
        self.drafts += bool(draft)
        self.drafted += len(draft)
        self.kept += len(chosen) - 1


def check_speculate(session: Any, speculate: Speculate) -> None:
    """Raise ValueError for another draft, or if the session cannot take back drafted tokens."""
    manifest: Manifest = session.manifest
    if speculate != LOOKUP:
        rule = f'speculate to be "{LOOKUP}"'
        raise expected(rule, short_repr(speculate), "leave it out for plain decoding")
    replaces = any(state.replaced for state in manifest.states)
    limited = replaces or any(state.window for state in manifest.states)
    if limited and session.rewindable < LEAST_REWIND:
        kept = "states that each call replaces" if replaces else "caches of windows"
        rule = f"rewind of at least {LEAST_REWIND} for speculate with {kept}"
        remedy = f"open the session with rewind={LEAST_REWIND}"
        raise expected(rule, session.rewindable, remedy)


def _kept(reader: Reader, draft: List[int], logits: np.ndarray) -> List[int]:
    """Choose tokens from logits [S,V] of a row as long as the drafted ones are those chosen."""
    chosen: List[int] = []
    last = logits[len(logits) - len(draft) - 1 :]
    for drafted, token_logits in zip([*draft, None], last, strict=True):
        chosen.append(reader.take(token_logits))
        if reader.done or chosen[-1] != drafted:
            break
    return chosen
