"""Scenarios in which rows have different lengths, are rewound by different counts, or come and
go.
"""

from typing import Any, Sequence

import numpy as np

from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification.case import Calls, Case, Pairs


class RowCursors:
    """Reading positions of the rows of a case, which may advance by different numbers of tokens.

    Args:
        session: reads the rows.
        case: sequences and expected outputs of the rows.
    """

    def __init__(self, session: Calls, case: Case) -> None:
        self.session, self.total = session, case.tokens.shape[1]
        self.tokens, self.full = list(case.tokens), list(case.full)
        self.at = [0] * len(case.tokens)

    def read(self, counts: Sequence[int], logits_to_keep: int = 0, **how: Any) -> Pairs:
        """Feed up to counts[b] more tokens of row b; compares the last `logits_to_keep`, or all."""
        ends = [min(at + count, self.total) for at, count in zip(self.at, counts, strict=True)]
        if ends == self.at:
            return
        parts = [row[at:end] for row, at, end in zip(self.tokens, self.at, ends, strict=True)]
        result = self.session.prefill(parts, logits_to_keep=logits_to_keep, **how)
        for row, (at, end) in enumerate(zip(self.at, ends, strict=True)):
            outputs = result[row, : end - at]
            if logits_to_keep:  # outputs are aligned to the last column
                outputs = result[row, result.shape[1] - min(logits_to_keep, end - at) :]
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


def ragged(session: Calls, case: Case) -> Pairs:
    """Prefill rows of different lengths, then different numbers of further tokens, then step."""
    rows, cursors = range(len(case.tokens)), RowCursors(session, case)
    lengths = [max(1, cursors.total // 2 - 3 * row) for row in rows]
    yield from cursors.read(lengths, **case.beginning())
    for shortest in rows:
        yield from cursors.read([1 + (row - shortest) % len(rows) for row in rows])
    yield from cursors.step(3)


def last_of_ragged(session: Calls, case: Case) -> Pairs:
    """As `ragged`, with the outputs of the last tokens only, within one chunk or two."""
    rows, cursors = range(len(case.tokens)), RowCursors(session, case)
    lengths = [max(1, cursors.total // 2 - 3 * row) for row in rows]
    yield from cursors.read(lengths, 1, chunk=5, **case.beginning())
    yield from cursors.read([4 - row for row in rows], 3, chunk=2)
    yield from cursors.step(1)
    yield from cursors.read([1 + 2 * row for row in rows], 1)
    yield from cursors.step(2)


def ragged_at_once(session: Calls, case: Case) -> Pairs:
    """Prefill rows of different lengths together, and compare with each row alone."""
    rows = _shortened(case)
    together = session.prefill(rows, start=case.start)
    for row, tokens in enumerate(rows):
        yield together[row, : len(tokens)], session.prefill(tokens[None], start=case.start)[0]


def read_out_of_ragged(session: Session, case: Case) -> Pairs:
    """As `ragged_at_once`, with the second output."""
    rows = _shortened(case)
    together = session.read_out(rows, case.start)
    for row, tokens in enumerate(rows):
        alone = session.read_out(tokens[None], case.start)[0]
        yield together[row] if alone.ndim == 1 else together[row, : len(tokens)], alone


def _shortened(case: Case) -> Sequence[np.ndarray]:
    return [tokens[: max(1, len(tokens) - 3 * row)] for row, tokens in enumerate(case.tokens)]


def rewound_by_row(session: Calls, case: Case) -> Pairs:
    """Rewind each row by another count; rows rewound to the fork take the other ending."""
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


def admitted(session: Calls, case: Case) -> Pairs:
    """Admit rows one by one, retire them in another order, and admit one when all have gone."""
    total = case.tokens.shape[1]
    running, at = [0], [min(5, total)]
    yield session.prefill(case.tokens[:1, : at[0]], **case.beginning(0, 1)), case.full[:1, : at[0]]

    def step() -> Pairs:
        if max(at) < total:
            tokens = [case.tokens[row, index] for row, index in zip(running, at, strict=True)]
            result = session.step(np.stack(tokens))
            for place, row in enumerate(running):
                yield result[place], case.full[row, at[place]]
                at[place] += 1

    for row in range(1, len(case.tokens)):
        count, only = min(2 + row, total), slice(row, row + 1)
        outputs = session.admit(case.tokens[only, :count], chunk=2, **case.beginning(row, row + 1))
        yield outputs, case.full[only, :count]
        running.append(row)
        at.append(count)
        yield from step()
    while running:
        gone = running[0]
        session.retire(0)
        for numbers in (running, at):
            numbers[0] = numbers[-1]
            numbers.pop()
        if running:
            yield from step()
    only = slice(gone, gone + 1)
    outputs = session.admit(case.other[only, :3], **case.beginning(gone, gone + 1))
    yield outputs, case.other_full[only, :3]
