"""Drafts for speculative decoding, from the text of the row itself or from a smaller decoder."""

from typing import Any, Callable, Dict, List, Protocol, Sequence, Tuple

import numpy as np

from posenc_export.runtime.session.stepper import WIDEST

SIZES = (8, 4, 2)  # tokens of an n-gram that a look-up searches, the most reliable first
DRAFTED = 0  # stands for a draft of another model, where others are the size of an n-gram
# Probability that a drafted token is right, assumed before any is seen.
LIKELY = {8: 0.85, 4: 0.6, 2: 0.25, DRAFTED: 0.7}
# The token that would be chosen from logits [V] as the n-th next token of the row, from 0.
Guess = Callable[[int, np.ndarray], int]


def common(text: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both texts begin."""
    for index, (token, other_token) in enumerate(zip(text, other, strict=False)):
        if token != other_token:
            return index
    return min(len(text), len(other))


def keep(session: Any, cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Take back what the cache of the only row, with the ids `cached`, holds beyond the tokens with
    which a prompt begins, and at least its last one. Return the number of tokens that are left.
    """
    equal = common(cached, prompt[:-1])
    try:
        session.rewind(len(cached) - equal)
    except ValueError:  # a state that each call replaces keeps a limited history
        session.reset()
        equal = 0
    return equal


class Drafts(Protocol):
    """Drafts the tokens of one row."""

    free: bool  # whether a draft costs no time that is worth counting

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text of the row."""

    def propose(self, count: int, guess: Guess) -> Tuple[List[int], int]:
        """Return at most `count` tokens that may follow, and their source, a key of LIKELY."""


class Lookup:
    """The continuation of the last earlier occurrence of the latest tokens (Saxena 2023, Prompt
    Lookup Decoding), of the longest n-gram of SIZES that occurs in the text of the row.
    """

    free = True

    def __init__(self, text: Sequence[int]) -> None:
        self._text: List[int] = []
        # By n-gram: index of the token after its last occurrence.
        self._following: Dict[Tuple[int, ...], int] = {}
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
