"""The parity grid: ways of cutting a sequence into calls that must all give what one full pass gives.

A scenario drives a session and yields (actual, expected) pairs; `tokens` are the inputs [B,L,...] of a Case and `full` its full pass [B,L,...].
"""

from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Tuple

import numpy as np

from posenc_export.runtime import Session

Pairs = Iterator[Tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Case:
    """Inputs of a few rows from a start position, what a full pass gives for them, and the same for another ending.

    Args:
        tokens: [B,L] int64 or [B,L,E].
        full: [B,L,V] or [B,L,E] from one pass.
        start: position of the first token.
        fork_at: tokens and other agree up to here.
        other, other_full: the same start with another ending.
    """

    tokens: np.ndarray
    full: np.ndarray
    start: int
    fork_at: int
    other: np.ndarray
    other_full: np.ndarray


def split(past: int, new: int) -> Callable[[Session, Case], Pairs]:
    """`past` tokens in the cache, then `new` at once."""

    def scenario(session: Session, case: Case) -> Pairs:
        if past:
            yield session.prefill(case.tokens[:, :past], start=case.start), case.full[:, :past]
        after = case.tokens[:, past : past + new]
        yield session.prefill(after, start=0 if past else case.start), case.full[:, past : past + new]

    return scenario


def chunked(chunk: int) -> Callable[[Session, Case], Pairs]:
    """One prefill fed in chunks."""

    def scenario(session: Session, case: Case) -> Pairs:
        yield session.prefill(case.tokens, start=case.start, chunk=chunk), case.full

    return scenario


def stepped(session: Session, case: Case) -> Pairs:
    """One token at a time, from an empty cache."""
    yield session.prefill(case.tokens[:, :1], start=case.start), case.full[:, :1]
    for index in range(1, case.tokens.shape[1]):
        yield session.step(case.tokens[:, index]).copy(), case.full[:, index]


def left_padded(session: Session, case: Case) -> Pairs:
    """Row b behind b + 1 columns of padding, then steps."""
    length = case.tokens.shape[1] // 2
    rows = len(case.tokens)
    mask = np.zeros((rows, length + rows), np.int64)
    padded = np.repeat(case.tokens[:, -1:], length + rows, axis=1)
    for row in range(rows):
        mask[row, row + 1 : row + 1 + length] = 1
        padded[row, row + 1 : row + 1 + length] = case.tokens[row, :length]
    result = session.prefill(padded, start=case.start, attention_mask=mask)
    for row in range(rows):
        yield result[row, row + 1 : row + 1 + length], case.full[row, :length]
    for index in range(length, length + 3):
        yield session.step(case.tokens[:, index]).copy(), case.full[:, index]


def ragged(session: Session, case: Case) -> Pairs:
    """Rows of different lengths, then ragged chunks on the filled caches, then steps."""
    total = case.tokens.shape[1]
    lengths = [max(1, total // 2 - 3 * row) for row in range(len(case.tokens))]
    more = [4 - row for row in range(len(case.tokens))]
    first = session.prefill([case.tokens[row, :n] for row, n in enumerate(lengths)], start=case.start)
    for row, n in enumerate(lengths):
        yield first[row, :n], case.full[row, :n]
    second = session.prefill([case.tokens[row, n : n + m] for row, (n, m) in enumerate(zip(lengths, more, strict=True))])
    for row, (n, m) in enumerate(zip(lengths, more, strict=True)):
        yield second[row, :m], case.full[row, n : n + m]
    for _ in range(3):
        at = [n + m for n, m in zip(lengths, more, strict=True)]
        result = session.step(np.stack([case.tokens[row, n] for row, n in enumerate(at)])).copy()
        for row, n in enumerate(at):
            yield result[row], case.full[row, n]
        more = [m + 1 for m in more]


def rewound(session: Session, case: Case) -> Pairs:
    """Past the fork by chunk and by step, back, and along the other ending: nothing stale may be seen."""
    at = case.fork_at
    session.prefill(case.tokens[:, : at + 4], start=case.start)
    session.step(case.tokens[:, at + 4])
    session.rewind(5)
    yield session.step(case.other[:, at]).copy(), case.other_full[:, at]
    session.rewind(1)
    yield session.prefill(case.other[:, at:]), case.other_full[:, at:]


def forked(session: Session, case: Case) -> Pairs:
    """Two sessions from one cache, in turn, each along its own ending."""
    at = case.fork_at
    session.prefill(case.tokens[:, :at], start=case.start)
    other = session.fork()
    for index in range(at, at + 4):
        yield session.step(case.tokens[:, index]).copy(), case.full[:, index]
        yield other.step(case.other[:, index]).copy(), case.other_full[:, index]


def padded_around(session: Session, case: Case) -> Pairs:
    """Row b behind b + 1 columns of padding, all tokens at once."""
    rows, length = case.tokens.shape[:2]
    mask = np.zeros((rows, length + rows), np.int64)
    padded = np.repeat(case.tokens[:, -1:], length + rows, axis=1)
    for row in range(rows):
        mask[row, row + 1 : row + 1 + length] = 1
        padded[row, row + 1 : row + 1 + length] = case.tokens[row]
    result = session.prefill(padded, start=case.start, attention_mask=mask)
    for row in range(rows):
        yield result[row, row + 1 : row + 1 + length], case.full[row]


def ragged_at_once(session: Session, case: Case) -> Pairs:
    """Rows of different lengths together give what each gives alone."""
    rows = [tokens[: len(tokens) - 3 * row] for row, tokens in enumerate(case.tokens)]
    together = session.prefill(rows, start=case.start)
    for row, tokens in enumerate(rows):
        yield together[row, : len(tokens)], session.prefill(tokens[None], start=case.start)[0]


def grid_of_whole_calls(length: int) -> Dict[str, Callable[[Session, Case], Pairs]]:
    """The scenarios of bidirectional models, which have no cache."""
    return {"at once": split(0, length), "padding": padded_around, "ragged rows": ragged_at_once}


def grid(length: int) -> Dict[str, Callable[[Session, Case], Pairs]]:
    """The scenarios for sequences of `length` tokens, by name."""
    middle, many = length // 2, length // 3
    pasts: List[Tuple[str, int]] = [("0", 0), ("1", 1), ("middle", middle)]
    cells = {f"past {name}, new {new}": split(past, new) for name, past in pasts for new in (1, 2, many)}
    cells["past last, new 1"] = split(length - 1, 1)
    return {
        **cells,
        "chunks of 1": chunked(1),
        "chunks of 5": chunked(5),
        "steps": stepped,
        "left padding": left_padded,
        "ragged rows": ragged,
        "rewind": rewound,
        "fork": forked,
    }
