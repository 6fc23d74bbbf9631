"""The parity grid: ways to split a sequence into calls, all of which must give the same outputs as
one full pass.

A scenario drives a session and yields pairs of actual and expected outputs.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.session.session import Session

Pairs = Iterator[Tuple[np.ndarray, np.ndarray]]
Scenario = Callable[["Session", "Case"], Pairs]


@dataclass(frozen=True)
class Case:
    """Inputs of a few rows, the outputs of a full pass over them, and both for a second ending."""

    tokens: np.ndarray  # inputs [B,L] int64 or [B,L,E]
    full: np.ndarray  # outputs of the full pass [B,L,V] or [B,L,E]
    start: Union[int, Sequence[int]]  # position of the first token, or that of each row
    fork_at: int  # index of the first token in which `tokens` and `other` differ
    other: np.ndarray  # inputs and full pass of the same rows with the second ending
    other_full: np.ndarray
    encoder: Optional[Sequence[np.ndarray]] = (
        None  # encoder outputs of each row [q,N], if the model reads an encoder
    )
    readout: Optional[np.ndarray] = (
        None  # second output for `tokens`, [B,N] or [B,L,N], if the model has one
    )

    def rows(self, count: int) -> "Case":
        """Return the case of the first `count` rows."""
        return dataclasses.replace(
            self,
            tokens=self.tokens[:count],
            full=self.full[:count],
            start=self.start if isinstance(self.start, int) else self.start[:count],
            other=self.other[:count],
            other_full=self.other_full[:count],
            encoder=self.encoder and self.encoder[:count],
            readout=None if self.readout is None else self.readout[:count],
        )

    def beginning(self, first: int = 0, end: Optional[int] = None) -> Dict[str, Any]:
        """Return the keyword arguments of the first call on the rows first .. end - 1 (None: all
        rows from `first` on).
        """
        start = self.start if isinstance(self.start, int) else list(self.start[first:end])
        return {
            "start": start,
            **({} if self.encoder is None else {"encoder": self.encoder[first:end]}),
        }


# Scenarios that `load` runs on a provider other than the CPU: several tokens on an empty and on a
# filled cache, one token, rows of different lengths, padding.
AT_LOAD = ("past middle, new 1", "ragged rows", "left padding", "at once", "padding")


def split(past: int, new: int) -> Scenario:
    """Prefill `past` tokens, then `new` tokens in one call."""

    def scenario(session: Session, case: Case) -> Pairs:
        if past:
            yield session.prefill(case.tokens[:, :past], **case.beginning()), case.full[:, :past]
        after = case.tokens[:, past : past + new]
        yield (
            session.prefill(after, **({} if past else case.beginning())),
            case.full[:, past : past + new],
        )

    return scenario


def chunked(chunk: int) -> Scenario:
    """Prefill all tokens in chunks."""

    def scenario(session: Session, case: Case) -> Pairs:
        yield session.prefill(case.tokens, chunk=chunk, **case.beginning()), case.full

    return scenario


def stepped(session: Session, case: Case) -> Pairs:
    """Feed one token at a time, from an empty cache."""
    yield session.prefill(case.tokens[:, :1], **case.beginning()), case.full[:, :1]
    for index in range(1, case.tokens.shape[1]):
        yield session.step(case.tokens[:, index]), case.full[:, index]


def left_padded(session: Session, case: Case) -> Pairs:
    """Prefill with b + 1 columns of left padding in row b, then step."""
    rows, total = case.tokens.shape[:2]
    length = max(1, total // 2)
    padded, mask = _behind_padding(case.tokens[:, :length])
    result = session.prefill(padded, attention_mask=mask, **case.beginning())
    for row in range(rows):
        yield result[row, row + 1 : row + 1 + length], case.full[row, :length]
    for index in range(length, min(length + 3, total)):
        yield session.step(case.tokens[:, index]), case.full[:, index]


def _behind_padding(tokens: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Pad tokens [B,n] or [B,n,E] to n+B columns, with b + 1 columns of left padding in row b.
    Return them and their mask [B,n+B].
    """
    rows, length = tokens.shape[:2]
    mask = np.zeros((rows, length + rows), np.int64)
    padded = np.repeat(tokens[:, -1:], length + rows, axis=1)
    for row in range(rows):
        mask[row, row + 1 : row + 1 + length] = 1
        padded[row, row + 1 : row + 1 + length] = tokens[row]
    return padded, mask


class RowCursors:
    """Reading positions of the rows of a case, which may advance by different numbers of tokens.

    Args:
        session: reads the rows.
        case: sequences and expected outputs of the rows.
    """

    def __init__(self, session: Session, case: Case) -> None:
        self.session, self.total = session, case.tokens.shape[1]
        self.tokens, self.full = list(case.tokens), list(case.full)
        self.at = [0] * len(case.tokens)

    def read(self, counts: Sequence[int], logits_to_keep: int = 0, **how: Any) -> Pairs:
        """Feed up to counts[b] more tokens of row b in one call. Compares the outputs of the
        last `logits_to_keep` tokens of each row, or of all if 0.
        """
        ends = [min(at + count, self.total) for at, count in zip(self.at, counts, strict=True)]
        if ends == self.at:
            return
        parts = [row[at:end] for row, at, end in zip(self.tokens, self.at, ends, strict=True)]
        result = self.session.prefill(parts, logits_to_keep=logits_to_keep, **how)
        for row, (at, end) in enumerate(zip(self.at, ends, strict=True)):
            last = min(logits_to_keep, end - at)
            outputs = (
                result[row, result.shape[1] - last :] if logits_to_keep else result[row, : end - at]
            )
            yield outputs, self.full[row][end - len(outputs) : end]
        self.at = ends

    def step(self, times: int) -> Pairs:
        """Feed one token of every row, `times` times or until a row has no token left."""
        for _ in range(min(times, self.total - max(self.at))):
            result = self.session.step(
                np.stack([row[at] for row, at in zip(self.tokens, self.at, strict=True)])
            )
            for row, at in enumerate(self.at):
                yield result[row], self.full[row][at]
            self.at = [at + 1 for at in self.at]

    def rewind(self, back: Sequence[int]) -> None:
        """Take back back[b] tokens of row b, or all its tokens if it has fewer."""
        fewer = [min(n, at) for n, at in zip(back, self.at, strict=True)]
        self.session.rewind(np.array(fewer))
        self.at = [at - n for at, n in zip(self.at, fewer, strict=True)]


def ragged(session: Session, case: Case) -> Pairs:
    """Prefill rows of different lengths, then different numbers of further tokens, then step. In
    turn, each row has the fewest further tokens.
    """
    rows, cursors = range(len(case.tokens)), RowCursors(session, case)
    yield from cursors.read(
        [max(1, case.tokens.shape[1] // 2 - 3 * row) for row in rows], **case.beginning()
    )
    for shortest in rows:
        yield from cursors.read([1 + (row - shortest) % len(rows) for row in rows])
    yield from cursors.step(3)


def last_of_ragged(session: Session, case: Case) -> Pairs:
    """As `ragged`, with the outputs of the last tokens only; these tokens are within one chunk
    or span two.
    """
    rows, cursors = range(len(case.tokens)), RowCursors(session, case)
    yield from cursors.read(
        [max(1, case.tokens.shape[1] // 2 - 3 * row) for row in rows],
        1,
        chunk=5,
        **case.beginning(),
    )
    yield from cursors.read([4 - row for row in rows], 3, chunk=2)
    yield from cursors.step(1)
    yield from cursors.read([1 + 2 * row for row in rows], 1)
    yield from cursors.step(2)


def last_of_left_padded(session: Session, case: Case) -> Pairs:
    """Prefill twice with b + 1 columns of left padding in row b, with the outputs of the last
    tokens only.
    """
    total = case.tokens.shape[1]
    middle = max(1, total // 2)
    for first, end, count, how in ((0, middle, 1, case.beginning()), (middle, total, 2, {})):
        if first < end:
            padded, mask = _behind_padding(case.tokens[:, first:end])
            result = session.prefill(padded, attention_mask=mask, logits_to_keep=count, **how)
            yield result, case.full[:, max(first, end - count) : end]


def rewound(session: Session, case: Case) -> Pairs:
    """Feed tokens past the fork by prefill and step, rewind to it, and feed the other ending:
    stale cache content must not be read.
    """
    at, beyond = case.fork_at, min(4, case.tokens.shape[1] - case.fork_at - 1)
    session.prefill(case.tokens[:, : at + beyond], **case.beginning())
    session.step(case.tokens[:, at + beyond])
    session.rewind(beyond + 1)
    yield session.step(case.other[:, at]), case.other_full[:, at]
    session.rewind(1)
    yield session.prefill(case.other[:, at:]), case.other_full[:, at:]


def rewound_by_row(session: Session, case: Case) -> Pairs:
    """Rewind each row by a different count, after calls with equal and with different numbers of
    tokens. Rows rewound to the fork take the other ending.
    """
    cursors, last = RowCursors(session, case), len(case.tokens) - 1
    yield from cursors.read([case.fork_at + 4] * (last + 1), **case.beginning())
    cursors.rewind([*(4 + row for row in range(last)), 0])
    cursors.tokens[:last], cursors.full[:last] = case.other[:last], case.other_full[:last]
    yield from cursors.read([3 + 2 * row for row in range(last + 1)])
    yield from cursors.step(2)
    cursors.rewind([1 + (row + 1) % 3 for row in range(last + 1)])
    yield from cursors.step(3)
    cursors.rewind([2] * (last + 1))
    yield from cursors.read([5 - row for row in range(last + 1)])


def forked(session: Session, case: Case) -> Pairs:
    """Fork a session and step both sessions alternately, each with its own ending."""
    at = case.fork_at
    session.prefill(case.tokens[:, :at], **case.beginning())
    other = session.fork()
    for index in range(at, min(at + 4, case.tokens.shape[1])):
        yield session.step(case.tokens[:, index]), case.full[:, index]
        yield other.step(case.other[:, index]), case.other_full[:, index]


def admitted(session: Session, case: Case) -> Pairs:
    """Admit rows one by one while earlier rows run, retire them in another order, and admit a
    row again after the last has gone.
    """
    total = case.tokens.shape[1]
    running, at = [0], [min(5, total)]
    yield session.prefill(case.tokens[:1, : at[0]], **case.beginning(0, 1)), case.full[:1, : at[0]]

    def step(rows: Sequence[int]) -> Pairs:
        if max(at[index] for index in range(len(rows))) < total:
            result = session.step(
                np.stack([case.tokens[row, at[index]] for index, row in enumerate(rows)])
            )
            for index, row in enumerate(rows):
                yield result[index], case.full[row, at[index]]
                at[index] += 1

    for row in range(1, len(case.tokens)):
        count = min(2 + row, total)
        yield (
            session.admit(
                case.tokens[row : row + 1, :count], chunk=2, **case.beginning(row, row + 1)
            ),
            case.full[row : row + 1, :count],
        )
        running.append(row)
        at.append(count)
        yield from step(running)
    while running:
        gone = running[0]
        session.retire(0)
        for numbers in (running, at):
            numbers[0] = numbers[-1]
            numbers.pop()
        if running:
            yield from step(running)
    yield (
        session.admit(case.other[gone : gone + 1, :3], **case.beginning(gone, gone + 1)),
        case.other_full[gone : gone + 1, :3],
    )


def padded_around(session: Session, case: Case) -> Pairs:
    """Prefill all tokens with b + 1 columns of left padding in row b, and right padding."""
    rows, length = case.tokens.shape[:2]
    padded, mask = _behind_padding(case.tokens)
    result = session.prefill(padded, attention_mask=mask, **case.beginning())
    for row in range(rows):
        yield result[row, row + 1 : row + 1 + length], case.full[row]


def ragged_at_once(session: Session, case: Case) -> Pairs:
    """Prefill rows of different lengths together, and compare with each row alone."""
    rows = [tokens[: max(1, len(tokens) - 3 * row)] for row, tokens in enumerate(case.tokens)]
    together = session.prefill(rows, start=case.start)
    for row, tokens in enumerate(rows):
        yield together[row, : len(tokens)], session.prefill(tokens[None], start=case.start)[0]


def read_out_at_once(session: Session, case: Case) -> Pairs:
    """Read all tokens, and compare the second output."""
    assert case.readout is not None
    yield session.read_out(case.tokens, start=case.start), case.readout


def read_out_of_padded(session: Session, case: Case) -> Pairs:
    """As `padded_around`, with the second output."""
    assert case.readout is not None
    length = case.tokens.shape[1]
    padded, mask = _behind_padding(case.tokens)
    result = session.read_out(padded, case.start, mask)
    for row, expected in enumerate(case.readout):
        yield (
            result[row] if expected.ndim == 1 else result[row, row + 1 : row + 1 + length],
            expected,
        )


def read_out_of_ragged(session: Session, case: Case) -> Pairs:
    """As `ragged_at_once`, with the second output."""
    rows = [tokens[: max(1, len(tokens) - 3 * row)] for row, tokens in enumerate(case.tokens)]
    together = session.read_out(rows, case.start)
    for row, tokens in enumerate(rows):
        alone = session.read_out(tokens[None], case.start)[0]
        yield together[row] if alone.ndim == 1 else together[row, : len(tokens)], alone


def grid_of_read_outs() -> Dict[str, Scenario]:
    """Return the scenarios for models with a second output."""
    return {
        "at once": read_out_at_once,
        "padding": read_out_of_padded,
        "ragged rows": read_out_of_ragged,
    }


def grid_of_last_outputs() -> Dict[str, Scenario]:
    """Return the scenarios for graphs that compute the outputs of selected tokens."""
    return {"last of ragged rows": last_of_ragged, "last of left padding": last_of_left_padded}


def grid_of_whole_calls(length: int) -> Dict[str, Scenario]:
    """Return the scenarios for bidirectional models, which have no cache."""
    return {"at once": split(0, length), "padding": padded_around, "ragged rows": ragged_at_once}


def grid(length: int) -> Dict[str, Scenario]:
    """Return the scenarios for sequences of `length` tokens, by name."""
    middle, many = length // 2, length // 3
    pasts: List[Tuple[str, int]] = [("0", 0), ("1", 1), ("middle", middle)]
    cells = {
        f"past {name}, new {new}": split(past, new)
        for name, past in pasts
        for new in (1, 2, many)
        if 0 < new and past + new <= length
    }
    if length > 1:
        cells["past last, new 1"] = split(length - 1, 1)
        cells |= {"rewind": rewound, "rewind by row": rewound_by_row, "fork": forked}
    return {
        **cells,
        "chunks of 1": chunked(1),
        "chunks of 5": chunked(5),
        "steps": stepped,
        "left padding": left_padded,
        "ragged rows": ragged,
    }
