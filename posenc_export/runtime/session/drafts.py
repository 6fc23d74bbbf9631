"""Drafts for speculative decoding: tokens that may follow the text of a row, from the text
itself or from a smaller decoder.
"""

from typing import Any, Callable, Dict, List, Protocol, Sequence, Tuple

import numpy as np

from posenc_export.runtime.session.stepper import WIDEST

SIZES = (8, 4, 2)  # tokens of an n-gram that a look-up searches, the most reliable first
DRAFTED = 0  # stands for a draft of another model, where others are the size of an n-gram
LIKELY = {
    8: 0.85,
    4: 0.6,
    2: 0.25,
    DRAFTED: 0.7,
}  # probability that a drafted token is right, assumed before any is seen
Guess = Callable[
    [int, np.ndarray], int
]  # the token that would be chosen from logits [V] as the n-th next token of the row, from 0


class Drafts(Protocol):
    """Drafts the tokens of one row.

    Attributes:
        free: whether a draft costs no time that is worth counting.
    """

    free: bool

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text of the row."""

    def propose(self, count: int, guess: Guess) -> Tuple[List[int], int]:
        """Return at most `count` tokens that may follow the text, and how they were found: a key
        of LIKELY.
        """


class Lookup:
    """The continuation of the last earlier occurrence of the latest tokens (Saxena 2023, Prompt
    Lookup Decoding), of the longest n-gram of SIZES that occurs.

    Args:
        text: tokens of the row so far.
    """

    free = True

    def __init__(self, text: Sequence[int]) -> None:
        self._text: List[int] = []
        self._following: Dict[
            Tuple[int, ...], int
        ] = {}  # by n-gram: index of the token after its last occurrence
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        text = self._text
        for token in tokens:
            for size in SIZES:  # the n-grams that end before this token
                if len(text) >= size:
                    self._following[tuple(text[-size:])] = len(text)
            text.append(int(token))

    def propose(self, count: int, guess: Guess) -> Tuple[List[int], int]:
        text = self._text
        for size in SIZES:
            begin = self._following.get(tuple(text[-size:])) if len(text) >= size else None
            if begin is not None:
                period = len(text) - begin  # past its end, the text is taken to repeat
                return [text[begin + index % period] for index in range(count)], size
        return [], SIZES[-1]


class DraftModel:
    """The tokens that another decoder of the same vocabulary generates.

    Args:
        session: a session of the draft model, without rows.
        text: tokens of the row so far.
    """

    free = False

    def __init__(self, session: Any, text: Sequence[int]) -> None:
        self._session = session
        self._text = [int(token) for token in text]
        self._read: List[int] = []  # tokens in the cache of the session

    def extend(self, tokens: Sequence[int]) -> None:
        self._text += [int(token) for token in tokens]

    def propose(self, count: int, guess: Guess) -> Tuple[List[int], int]:
        text, session = self._text, self._session
        manifest = session.manifest
        count = min(count, manifest.max_positions - len(text))
        if count < 1:
            return [], DRAFTED
        same = next(
            (
                index
                for index, (read, token) in enumerate(zip(self._read, text[:-1], strict=False))
                if read != token
            ),
            min(len(self._read), len(text) - 1),
        )
        try:
            session.rewind(len(self._read) - same)
        except ValueError:  # states that each call replaces keep a limited history
            session.reset()
            same = 0
        self._read = text[:same]
        unread = text[same:]
        drafted: List[int] = []
        while True:
            if len(unread) == 1 and same:
                logits = session.step(np.array(unread), copy=False)[0]
            else:  # a pass of few tokens has a binding that gives all logits
                logits = session.prefill(
                    np.array([unread]), logits_to_keep=1 if len(unread) > WIDEST else None
                )[0, -1]
            self._read += unread
            same = len(self._read)
            drafted.append(guess(len(drafted), logits))
            if len(drafted) == count:
                return drafted, DRAFTED
            unread = drafted[-1:]
