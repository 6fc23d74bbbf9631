"""Scenarios in which rows have different lengths, are rewound by different counts, come and go."""

from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification.case import Calls, Case, Pairs


class RowCursors:
    """Reading positions of the rows of a case, which may advance by different numbers of tokens."""

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
            tokens = [row[at] for row, at in zip(self.tokens, self.at, strict=True)]
            result = self.session.step(np.stack(tokens))
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


def admitted(session: Session, case: Case) -> Pairs:
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


class WithTransientRows:
    """An empty session for the rows of a scenario, while a guest row is present in every second
    call. The first guest has index 0. When it is retired, the last row moves to that index.

    Args:
        guests, encoder: tokens of the guests [n,L] or [n,L,E], which begin at position 1, and their
            encoder outputs [q,N].
    """

    def __init__(
        self, session: Session, guests: np.ndarray, encoder: Optional[Sequence[np.ndarray]]
    ) -> None:
        self.session, self.manifest = session, session.manifest
        self.guests, self.encoder = guests, encoder
        self.order: List[int] = []  # index in the session of each row of the scenario
        self.guest: Optional[int] = None

    def prefill(
        self,
        inputs: Any,
        start: Any = None,
        attention_mask: Optional[np.ndarray] = None,
        encoder: Optional[Sequence[np.ndarray]] = None,
        logits_to_keep: int = 0,
        **how: Any,
    ) -> np.ndarray:
        """Run Session.prefill for the rows of the scenario; the first call includes a guest."""
        rows = [np.asarray(row) for row in inputs]
        if attention_mask is not None:
            rows = [row[seen == 1] for row, seen in zip(rows, attention_mask, strict=True)]
        beginning = {} if self.order else self._beginning(len(rows), start, encoder)
        if not self.order:
            self.order, self.guest = list(range(1, len(rows) + 1)), 0
            together = [self.guests[0, :4], *rows]
        else:
            self._exchange()
            together = [self.guests[0, :0]] * self.session.batch
            for index, row in zip(self.order, rows, strict=True):
                together[index] = row
        how |= {"logits_to_keep": logits_to_keep, **beginning}
        outputs = self.session.prefill(together, **how)
        lengths = np.array([len(row) for row in rows])
        if logits_to_keep:  # outputs are aligned to the last column
            return outputs[self.order, -min(logits_to_keep, lengths.max()) :]
        mask = np.arange(lengths.max()) < lengths[:, None]
        mask = mask if attention_mask is None else attention_mask == 1
        padded = np.zeros((*mask.shape, outputs.shape[-1]), outputs.dtype)
        for place, index in enumerate(self.order):
            padded[place, mask[place]] = outputs[index, : lengths[place]]
        return padded

    def _beginning(self, rows: int, start: Any, encoder: Any) -> Dict[str, Any]:
        starts = [1, *np.broadcast_to(start or 0, rows).tolist()]
        sources = None if self.encoder is None else [self.encoder[0], *(encoder or ())]
        return {"start": starts, "encoder": sources}

    def step(self, inputs: np.ndarray) -> np.ndarray:
        """Run Session.step for the rows of the scenario."""
        self._exchange()
        together = np.repeat(self.guests[:1, 4], self.session.batch, 0)
        together[self.order] = inputs
        return self.session.step(together)[self.order]

    def rewind(self, n: Any) -> None:
        """Run Session.rewind for the rows of the scenario; the guest is not rewound."""
        back = np.zeros(self.session.batch, np.int64)
        back[self.order] = n
        self.session.rewind(back)

    def fork(self) -> "WithTransientRows":
        """Run Session.fork; the fork has the same guest."""
        other = WithTransientRows(self.session.fork(), self.guests, self.encoder)
        other.order, other.guest = list(self.order), self.guest
        return other

    def _exchange(self) -> None:
        if self.guest is None:
            encoder = self.encoder and self.encoder[1:2]
            self.session.admit(self.guests[1:2, :3], start=1, encoder=encoder)
            self.guest = self.session.batch - 1
        else:
            last = self.session.batch - 1
            self.session.retire(self.guest)
            self.order = [self.guest if index == last else index for index in self.order]
            self.guest = None
