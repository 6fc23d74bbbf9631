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

from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Dict, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.arguments import short_repr
from posenc_export.runtime.session.errors import expected

SIZES = (8, 4, 2)  # tokens of an n-gram that a look-up searches, the most reliable first
MOST = 15  # largest number of drafted tokens
LOOKUP = "lookup"
LEAST_REWIND = 4 * MOST  # a row may be that many tokens ahead of what is returned
Speculate = Optional[str]  # None or LOOKUP


class Lookup:
    """The continuation of the last earlier occurrence of the latest tokens (Saxena 2023, Prompt
    Lookup Decoding), of the longest n-gram of SIZES that occurs in the text of the row.

    Attributes:
        count: number of tokens to draft next.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.count = 1
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

    def propose(self) -> List[int]:
        """Return `count` tokens that may follow, at least one; none without an occurrence."""
        text = self._text
        for size in SIZES:
            begin = self._following.get(tuple(text[-size:])) if len(text) >= size else None
            if begin is not None:
                period = len(text) - begin  # past its end, the text is taken to repeat
                return [text[begin + index % period] for index in range(max(self.count, 1))]
        return []


def next_count(count: int, right: bool) -> int:
    """Return the number of tokens to draft after `count` tokens that were all right or not: 0, 1,
    3, 7 or 15, read in passes of 2, 4, 8 or 16. After 0, whether the first one would have been.
    """
    return min(2 * count + 1, MOST) if right else count // 2


@dataclass
class Reader:
    """A row that is decoded."""

    # Token chosen from logits [V], as the row's generated token of this index
    choose: Callable[[int, np.ndarray], int]
    stops: Collection[int]  # ids that end the row
    most: int  # largest number of tokens to generate
    drafts: Optional[Lookup]  # drafts of the row; None for plain decoding
    unread: List[int] = field(default_factory=list)  # tokens to read before a token can be chosen
    count: int = 0  # number of tokens generated
    done: bool = False  # whether the row has ended

    def take(self, logits: np.ndarray) -> int:
        """Choose the next token, which is read by the next pass unless the row has ended."""
        token = self.choose(self.count, logits)
        self.count += 1
        if self.drafts:
            self.drafts.extend([token])
        self.unread = [token]
        self.done = token in self.stops or self.count >= self.most
        return token


class Speculator:
    """Reads the rows of a session, with drafts if it passes `check_speculate`."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def read(self, readers: Sequence[Optional[Reader]]) -> List[List[int]]:
        """Read the unread tokens of each row, None for one that does not read, in one pass. Return
        the tokens that are chosen after them: at least one for each row that reads. Raise as
        Session.step.
        """
        proposals = [r.drafts.propose() if r and r.drafts else [] for r in readers]
        drafts = self._drafts(readers, proposals)
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
        for (reader, draft), proposal, tokens in zip(pairs, proposals, chosen, strict=True):
            if reader and reader.drafts and proposal:
                compared = draft or proposal[:1]
                right = compared == tokens[: len(compared)]
                reader.drafts.count = next_count(reader.drafts.count, right)
        return chosen

    def _drafts(
        self, readers: Sequence[Optional[Reader]], proposals: Sequence[List[int]]
    ) -> List[List[int]]:
        """Return the proposed tokens to read, as far as a row may have more."""
        drafts, room = [], self._session.room.tolist()
        # Rows that are read one by one take as many runs of the graph as one step has rows.
        separate = self._session.manifest.continuation_rows == 1
        least = sum(map(bool, readers)) if separate else 1
        for reader, proposal, free in zip(readers, proposals, room, strict=True):
            most = 0
            if reader and reader.drafts and reader.drafts.count >= least:
                most = max(min(reader.most - reader.count - 1, free - len(reader.unread)), 0)
            drafts.append(proposal[:most])
        return drafts


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
