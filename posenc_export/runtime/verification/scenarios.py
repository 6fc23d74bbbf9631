"""Cases and scenarios of the parity grid. A scenario is a way to divide a case into calls, which
must give the outputs of one full pass.
"""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Protocol, Sequence

import numpy as np

from posenc_export.runtime.session.session import Session

Pairs = Iterator[tuple[np.ndarray, np.ndarray]]  # actual and expected outputs
# Given a session and `case`, drives the session and yields pairs of actual and expected outputs
Run = Callable[..., Pairs]


class Calls(Protocol):
    """The calls of a Session that scenarios of rows with caches make, with its arguments. Sessions
    on graphs that others exported have them, too (auditing/session.py).
    """

    def prefill(self, *inputs: Any, **how: Any) -> np.ndarray: ...

    def step(self, inputs: np.ndarray) -> np.ndarray: ...

    def rewind(self, n: Any) -> None: ...

    def reset(self) -> None: ...

    def fork(self) -> "Calls": ...


class Level(enum.IntEnum):
    """The grids; each has the cells of those before it."""

    LOAD = 0  # a few, for `load` on a provider other than the CPU
    QUICK = 1  # one of each kind of call
    WHOLE = 2  # those of one row, of all starts, and the long sequence, too


@dataclass(frozen=True)
class Case:
    """Inputs of a few rows, the outputs of a full pass over them, and both for a second ending."""

    tokens: np.ndarray  # inputs [B,L] int64 or [B,L,E]
    full: np.ndarray  # outputs of the full pass [B,L,V] or [B,L,E]
    starts: Sequence[int]  # position of the first token of each row
    fork_at: int  # index of the first token in which `tokens` and `other` differ
    other: np.ndarray  # inputs and full pass of the same rows with the second ending
    other_full: np.ndarray
    # Encoder outputs of each row [q,N], if the model reads an encoder.
    encoder: Sequence[np.ndarray] | None = None
    # Second output for `tokens`, [B,N] or [B,L,N], if the model has one.
    readout: np.ndarray | None = None

    def rows(self, count: int) -> "Case":
        """Return the case of the first `count` rows."""
        by_row = {name: part for name, part in vars(self).items() if name != "fork_at"}
        first = {name: part[:count] for name, part in by_row.items() if part is not None}
        return dataclasses.replace(self, **first)

    def beginning(self, first: int = 0, end: int | None = None) -> dict[str, Any]:
        """Return the keyword arguments of the first call on the rows first .. end - 1."""
        encoder = {} if self.encoder is None else {"encoder": self.encoder[first:end]}
        return {"start": list(self.starts[first:end]), **encoder}


@dataclass(frozen=True)
class AttributeCase:
    """Tokens with attributes: coordinates, segments or both."""

    tokens: np.ndarray  # [2,L] or [2,L,E]
    mask: np.ndarray  # attention mask [2,L]; with segments, the first row has left padding
    # Arguments of Session.prefill: "grid" [axes,2,L], "token_types" [2,L] or both.
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """A way to divide a case into calls, which must give the outputs of one full pass."""

    name: str  # in the certificate
    run: Run
    level: Level = Level.QUICK  # the smallest grid that has it


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    name: str  # in the certificate
    # Drives a session and yields pairs of actual and expected outputs
    pairs: Callable[[Any], Pairs]
    of: int = 0  # index of the compared output, in Manifest.outputs
    # Whether the session keeps the tokens of the cell before; else it is empty
    continues: bool = False


def split(past: int, new: int) -> Run:
    """Prefill `past` tokens, then `new` tokens in one call."""

    def run(session: Calls, case: Case) -> Pairs:
        if past:
            yield session.prefill(case.tokens[:, :past], **case.beginning()), case.full[:, :past]
        how = {} if past else case.beginning()
        outputs = session.prefill(case.tokens[:, past : past + new], **how)
        yield outputs, case.full[:, past : past + new]

    return run


def chunked(chunk: int) -> Run:
    """Prefill all tokens in chunks."""

    def run(session: Calls, case: Case) -> Pairs:
        yield session.prefill(case.tokens, chunk=chunk, **case.beginning()), case.full

    return run


def stepped_from(past: int) -> Run:
    """Prefill `past` tokens, then feed one at a time."""

    def run(session: Calls, case: Case) -> Pairs:
        yield session.prefill(case.tokens[:, :past], **case.beginning()), case.full[:, :past]
        for index in range(past, case.tokens.shape[1]):
            yield session.step(case.tokens[:, index]), case.full[:, index]

    return run


def left_padded(session: Calls, case: Case, length: int | None = None) -> Pairs:
    """Prefill half of the tokens, or `length`, with b + 1 columns of left padding in row b and
    right padding, then step.
    """
    rows, total = case.tokens.shape[:2]
    length = length or max(1, total // 2)
    padded, mask = _behind_padding(case.tokens[:, :length])
    result = session.prefill(padded, attention_mask=mask, **case.beginning())
    for row in range(rows):
        yield result[row, row + 1 : row + 1 + length], case.full[row, :length]
    for index in range(length, min(length + 3, total)):
        yield session.step(case.tokens[:, index]), case.full[:, index]


def _behind_padding(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pad tokens [B,n] or [B,n,E] by b + 1 columns at the left of row b; also return the mask."""
    rows, length = tokens.shape[:2]
    mask = np.zeros((rows, length + rows), np.int64)
    padded = np.repeat(tokens[:, -1:], length + rows, axis=1)
    for row in range(rows):
        mask[row, row + 1 : row + 1 + length] = 1
        padded[row, row + 1 : row + 1 + length] = tokens[row]
    return padded, mask


def last_of_left_padded(session: Calls, case: Case) -> Pairs:
    """Prefill twice with left padding, with the outputs of the last tokens only."""
    total = case.tokens.shape[1]
    middle = max(1, total // 2)
    for first, end, count, how in ((0, middle, 1, case.beginning()), (middle, total, 2, {})):
        if first < end:
            padded, mask = _behind_padding(case.tokens[:, first:end])
            result = session.prefill(padded, attention_mask=mask, logits_to_keep=count, **how)
            yield result, case.full[:, max(first, end - count) : end]


def forked(session: Calls, case: Case) -> Pairs:
    """Fork a session and step both sessions alternately, each with its own ending."""
    at = case.fork_at
    session.prefill(case.tokens[:, :at], **case.beginning())
    other = session.fork()
    for index in range(at, min(at + 4, case.tokens.shape[1])):
        yield session.step(case.tokens[:, index]), case.full[:, index]
        yield other.step(case.other[:, index]), case.other_full[:, index]


def padded_around(session: Calls, case: Case) -> Pairs:
    """As `left_padded`, with all tokens in the prompt."""
    return left_padded(session, case, case.tokens.shape[1])


def read_out_at_once(session: Session, case: Case) -> Pairs:
    """Read all tokens at once, and compare the second output."""
    assert case.readout is not None
    yield session.read_out(case.tokens, start=case.starts), case.readout


def read_out_of_padded(session: Session, case: Case) -> Pairs:
    """As `padded_around`, with the second output."""
    assert case.readout is not None
    padded, mask = _behind_padding(case.tokens)
    yield session.read_out(padded, case.starts, mask), case.readout


class RowCursors:
    """The next token of each row of a case; rows may advance by different numbers of tokens."""

    def __init__(self, session: Calls, case: Case) -> None:
        self.session, self.total = session, case.tokens.shape[1]
        self.tokens, self.full = list(case.tokens), list(case.full)
        self.at = [0] * len(case.tokens)

    def read(self, counts: Sequence[int], logits_to_keep: int = 0, **how: Any) -> Pairs:
        """Feed up to counts[b] more tokens of row b. Compare the last `logits_to_keep` or all."""
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
    together = session.prefill(rows, **case.beginning())
    for row, tokens in enumerate(rows):
        alone = session.prefill(tokens[None], **case.beginning(row, row + 1))
        yield together[row, : len(tokens)], alone[0]


def read_out_of_ragged(session: Session, case: Case) -> Pairs:
    """As `ragged_at_once`, with the second output."""
    rows = _shortened(case)
    together = session.read_out(rows, **case.beginning())
    for row, tokens in enumerate(rows):
        yield together[row], session.read_out(tokens[None], **case.beginning(row, row + 1))[0]


def _shortened(case: Case) -> Sequence[np.ndarray]:
    return [tokens[: max(1, len(tokens) - 3 * row)] for row, tokens in enumerate(case.tokens)]


def rewound_by_row(session: Calls, case: Case) -> Pairs:
    """Rewind each row by another count. All rows but the last, or the only row, are rewound to the
    fork or before, and take the other ending.
    """
    cursors, count = RowCursors(session, case), len(case.tokens)
    last = max(count - 1, 1)
    yield from cursors.read([case.fork_at + 4] * count, **case.beginning())
    cursors.rewind([4 + row if row < last else 0 for row in range(count)])
    cursors.tokens[:last], cursors.full[:last] = case.other[:last], case.other_full[:last]
    yield from cursors.read([3 + 2 * row for row in range(count)])
    yield from cursors.step(2)
    cursors.rewind([1 + (row + 1) % 3 for row in range(count)])
    yield from cursors.step(3)
    cursors.rewind([2] * count)
    yield from cursors.read([5 - row for row in range(count)])


def admitted(session: Session, case: Case) -> Pairs:
    """Admit rows one by one, retire them in another order, and admit a row when all are gone."""
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


# For models with a second output.
OF_READOUTS = (
    Scenario("at once", read_out_at_once),
    Scenario("padding", read_out_of_padded),
    Scenario("ragged rows", read_out_of_ragged),
)
# For graphs that compute the outputs of selected tokens.
OF_LAST_OUTPUTS = (
    Scenario("last of ragged rows", last_of_ragged),
    Scenario("last of left padding", last_of_left_padded),
)
# For sessions whose rows come and go.
OF_ROWS = Scenario("rows come and go", admitted)


def of_whole_calls(length: int) -> list[Scenario]:
    """Return the scenarios for bidirectional models, which have no cache."""
    return [
        Scenario("at once", split(0, length), Level.LOAD),
        Scenario("padding", padded_around, Level.LOAD),
        Scenario("ragged rows", ragged_at_once, Level.LOAD),
    ]


def of_caches(length: int) -> list[Scenario]:
    """Return the scenarios for sequences of `length` tokens in a model with caches: one of each
    kind of call. Other numbers of new and cached tokens are left to proofs (claims.py).
    """
    one = Scenario("past middle, new 1", split(length // 2, 1), Level.LOAD)
    several = (Scenario("rewind by row", rewound_by_row), Scenario("fork", forked))
    return [
        one,
        *(several if length > 1 else ()),
        Scenario("chunks of 5", chunked(5)),
        Scenario("steps", stepped_from(1)),
        Scenario("left padding", left_padded, Level.LOAD),
        Scenario("ragged rows", ragged, Level.LOAD),
    ]
