"""Make calls on sessions, described as plain data, and compare the outputs with those of each row
alone.

A call is a dictionary: "do" is the kind of call, "on" the index of the session, and the methods of
Driver document the other keys. Whether a call must be refused is decided from the tokens that were
fed, not by asking the session.
"""

import functools
from dataclasses import dataclass
from typing import Any, Callable, Sequence
from unittest import mock

import numpy as np

from posenc_export.runtime import Session
from posenc_export.runtime.session import generation
from posenc_export.runtime.session.prefixes import Prefixes, can_share
from tests.fuzz.rows_read import Reading
from tests.fuzz.subjects import MANY, TEXTS, Subject, Token
from tests.fuzz.wrong import wrong_calls

Call = dict[str, Any]
SESSIONS = 3  # most sessions at a time
BLOCKS, BLOCK = 4, 4  # of kept prefixes, and tokens of one: few, so that some are replaced
WATCHED = 6  # number of the latest outputs that are checked for later writes


@dataclass
class Twin:
    """A session, and the tokens that its rows have read."""

    session: Session
    rows: list[Reading]


def can_rewind(session: Session, n: Any) -> bool:
    """Return whether a fork of a session takes back more tokens than it must remember."""
    try:
        session.fork().rewind(n)
    except ValueError as error:
        assert "rewind" in str(error), error
        return False
    return True


def identity(token: Token) -> int:
    """Return a number of a token, which tokens of the same content at the same place share."""
    return token.text * 1000 + token.beside


class Driver:
    """Drives sessions of one artefact and checks their outputs.

    Args:
        subject: the artefact.
        options: batch, capacity and rewind of the first session.
    """

    def __init__(self, subject: Subject, options: dict[str, Any]) -> None:
        self.subject, self.manifest, self.options = subject, subject.manifest, options
        self.limit, size = options["rewind"], subject.spec.size
        self.capacity = min(options["capacity"] or size, size)
        self.twins = [Twin(subject.model.session(**options), [])]
        self.prefixes: Prefixes | None = None
        if subject.cached and can_share(self.manifest):
            self.prefixes = Prefixes(subject.model.graph, BLOCKS, BLOCK)
        self.owned: list[tuple[np.ndarray, np.ndarray]] = []
        self.calls = self.steps = self.refused = self.explained = 0
        self.worst: dict[str, float] = {}

    def apply(self, call: Call) -> None:
        """Make a call and check its output, the lengths of all sessions, and earlier outputs.

        Raises:
            AssertionError: an output or a length is wrong, or a call is wrongly refused or wrongly
                accepted.
        """
        twin = self.twins[call["on"] % len(self.twins)]
        self.calls += 1
        getattr(self, f"_{call['do']}")(twin, call)
        for each in self.twins:
            self._check_lengths(each)
        assert all(np.array_equal(array, copy) for array, copy in self.owned), (
            "an array that a call returned was written again"
        )

    def close(self) -> None:
        """Check that every session can continue."""
        for twin in self.twins:
            self._look_ahead(twin)

    def _prefill(self, twin: Twin, call: Call) -> None:
        """Keys: rows, a list of [text, attributes, number of tokens]; start; padding, a seed or
        None for a list of rows; chunk; keep, as logits_to_keep.
        """
        rows = self._before(twin, len(call["rows"]), call["start"])
        more, starts = self._asked(call)
        wrong = starts is None or rows is None or not any(more) or self._beyond(rows, more)
        if not wrong and call["start"] is not None and any(row.length for row in rows or ()):
            places = zip(rows or (), more, starts, strict=True)
            wrong = any(row.start + row.length != start for row, new, start in places if new)
        elif self.manifest.signature == "mask" and starts is not None and starts.any():
            wrong = True
        arguments, columns = self._given(call, more, rows)
        arguments |= self._encoder(twin, rows, call["start"])
        if wrong:
            self._must_refuse(twin, lambda: twin.session.prefill(**arguments))
            return
        assert rows is not None
        self._take(rows, more, call, twin.session.prefill(**arguments), columns)
        twin.rows = rows

    def _asked(self, call: Call) -> tuple[list[list[Token]], Any]:
        """Return the tokens of each row of a call, and their starts; None for a wrong number."""
        more = [[self._token(text, beside)] * n for text, beside, n in call["rows"]]
        start = 0 if call["start"] is None else call["start"]
        fits = np.shape(start) in ((), (len(more),))
        return more, np.broadcast_to(start, len(more)) if fits else None

    def _before(self, twin: Twin, count: int, start: Any) -> list[Reading] | None:
        """Return the rows before a prefill of `count` rows, or None if this prefill is not
        allowed.
        """
        rows = [row.copy() for row in twin.rows] if self.subject.cached else []
        if any(row.length for row in rows):
            return rows if len(rows) == count else None
        sources = self._sources(count)
        if start is None and len(rows) == count:
            starts, sources = [row.start for row in rows], [row.source for row in rows]
        elif np.shape(start) in ((), (count,)):
            starts = [int(n) for n in np.broadcast_to(0 if start is None else start, count)]
        else:
            return None
        both = zip(starts, sources, strict=True)
        return [Reading(first, self.limit, source=source) for first, source in both]

    def _sources(self, count: int) -> list[int]:
        """Choose the encoder sequence of each of `count` new rows; different ones for each call."""
        return [(self.calls + index) % max(len(self.subject.encoded), 1) for index in range(count)]

    def _encoder(self, twin: Twin, rows: list[Reading] | None, start: Any) -> dict[str, Any]:
        """Return the argument `encoder` for new rows; nothing for rows that keep their encoder
        outputs.
        """
        kept = any(row.length for row in twin.rows) or (
            start is None and rows is not None and len(twin.rows) == len(rows)
        )
        if not self.subject.encoded or rows is None or kept:
            return {}
        return {"encoder": [self.subject.encoded[row.source] for row in rows]}

    def _beyond(self, rows: Sequence[Reading], more: Sequence[list[Token]]) -> bool:
        """Whether the tokens exceed the range of positions or the capacity."""
        size = self.subject.spec.size
        room = all(
            0 <= row.start < size and row.start + row.length + len(tokens) <= size
            for row, tokens in zip(rows, more, strict=True)
        )
        held = max(row.length + len(tokens) for row, tokens in zip(rows, more, strict=True))
        return not room or (self.subject.in_place and held > self.capacity)

    def _given(
        self, call: Call, more: list[list[Token]], rows: list[Reading] | None
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return the arguments of a prefill or admit, and for each row the columns of its
        tokens.
        """
        tokens, numbers = self._contents(more, rows or [Reading(0, self.limit) for _ in more])
        count, mask, seed = [len(part) for part in tokens], None, call["padding"]
        columns, width = [np.arange(n) for n in count], max(count, default=0)
        if seed is not None:
            random, width = np.random.default_rng(seed), width + seed % 4
            columns = [int(random.integers(width - n + 1)) + np.arange(n) for n in count]
            texts = self.subject.texts
            inputs: Any = np.resize(texts[1], (len(count), width, *texts.shape[2:]))
            kind: Any = (np.int64, bool, np.float32, np.uint8)[seed % 4]
            mask = np.zeros((len(count), width), kind)
            for row, where in enumerate(columns):
                inputs[row, where], mask[row, where] = tokens[row], 1
        else:
            inputs = [list(row) if index % 2 else row for index, row in enumerate(tokens)]
            # Few tokens as an array are a call that the session repeats with a binding that it
            # keeps.
            if self.calls % 2 and len(set(count)) == 1:
                inputs = np.stack(tokens)
        beside = np.zeros((self.subject.beside.shape[1], len(count), width), np.int64)
        for row, where in enumerate(columns):
            beside[:, row, where] = numbers[row]
        arguments = {"inputs": inputs, "start": call["start"], "attention_mask": mask}
        arguments |= {"chunk": call["chunk"], "logits_to_keep": call.get("keep")}
        if any(token.beside >= 0 for row in more for token in row):
            arguments |= {"grid": beside} if self.manifest.axes else {}
        return arguments, columns

    def _contents(
        self, more: list[list[Token]], rows: list[Reading]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the next tokens of each row and their attributes. If they exceed the range, so
        that the call is refused, only the shapes are right.
        """
        subject, axes = self.subject, self.subject.beside.shape[1]
        whole = [[*row.tokens, *tokens] for row, tokens in zip(rows, more, strict=True)]
        if any(len(tokens) > subject.spec.size for tokens in whole):
            shape, counts = subject.texts.shape[2:], [len(part) for part in more]
            none = [np.zeros((axes, n), np.int64) for n in counts]
            return [np.resize(subject.texts[0], (n, *shape)) for n in counts], none
        pairs = [*zip(whole, rows, strict=True)]
        numbers = [subject.numbers(row, known.start, known.length) for row, known in pairs]
        return [subject.tokens(row, known.length) for row, known in pairs], numbers

    def _take(
        self,
        rows: list[Reading],
        more: list[list[Token]],
        call: Call,
        output: np.ndarray,
        columns: list[np.ndarray],
    ) -> None:
        """Record the tokens of a prefill or admit, and check its output: expected values at
        tokens, zeros at padding.
        """
        keep = call.get("keep") or 0
        rest = output.copy()
        for index, (row, tokens) in enumerate(zip(rows, more, strict=True)):
            row.read(tokens)
            where = columns[index]
            if keep:
                where = output.shape[1] - 1 - np.arange(min(keep, len(tokens)))[::-1]
            rest[index, where] = 0
            if tokens:
                self._compare(output[index, where], row, row.length - len(where), call)
        assert not rest.any(), f"{call['do']}: outputs at padding are zeros"
        assert not keep or output.shape[1] == min(keep, max(map(len, more))), (
            f"{call['do']}: outputs of {keep} tokens at most"
        )
        self._own(output)

    def _step(self, twin: Twin, call: Call) -> None:
        """Keys: times; texts, one per row; copy."""
        for _ in range(call["times"]):
            more = self._next(twin, call)
            if not self.subject.cached or not twin.rows or self._beyond(twin.rows, more):
                some = np.repeat(self.subject.texts[:1, 0], max(len(twin.rows), 1), 0)
                self._must_refuse(twin, lambda some=some: twin.session.step(some))  # type: ignore[misc]
                return
            for row, tokens in zip(twin.rows, more, strict=True):
                row.read(tokens)
            self.steps += 1
            last = [self.subject.tokens(row.tokens, row.length - 1) for row in twin.rows]
            output = twin.session.step(np.concatenate(last), copy=call["copy"])
            for index, row in enumerate(twin.rows):
                self._compare(output[index : index + 1], row, row.length - 1, call)
            if call["copy"]:
                self._own(output)

    def _next(self, twin: Twin, call: Call) -> list[list[Token]]:
        """Return the token of each row that a call with texts reads."""
        texts = call["texts"]
        return [[Token(texts[index % len(texts)] % TEXTS)] for index in range(len(twin.rows))]

    def _speculate(self, twin: Twin, call: Call) -> None:
        """Keys: times; texts, one per row. Generate in a fork, with drafts that are looked up
        wherever possible, and compare with what plain decoding chooses.
        """
        more, times = self._next(twin, call), call["times"]
        forgets = self.subject.replaces or self.subject.windows
        short = forgets and self.limit < generation.LEAST_REWIND
        if self.manifest.kind != "decoder" or not twin.rows or short:
            return
        if self._beyond(twin.rows, [tokens * times for tokens in more]):
            return
        session, plain = twin.session.fork(), twin.session.fork()
        prompt = [
            self.subject.tokens([*row.tokens, *tokens], row.length)
            for row, tokens in zip(twin.rows, more, strict=True)
        ]
        before = [self.subject.tokens(row.tokens, 0) for row in twin.rows]
        with mock.patch.object(generation, "next_count", lambda count, right: 3):
            drafts = session.generate(prompt, times, stop=(), speculate="lookup", before=before)
            ids = np.stack(list(drafts), axis=1)
        lengths = session.length.tolist()
        assert lengths == [row.length + times for row in twin.rows], f"got lengths {lengths}"
        for index, row in enumerate(twin.rows):
            whole = [*row.tokens, *more[index]]
            expected = self.subject.expected(row.start, whole, row.source)
            bound = max(against.bound for _, against in expected.values())
            read: list[Any] = [[]] * len(twin.rows)
            read[index] = [*prompt[index], *ids[index, :-1]]
            logits = plain.prefill(read)[index]
            short_of = logits.max(-1) - logits[np.arange(len(logits)), ids[index]]
            assert (short_of <= 2 * bound * np.abs(logits).max()).all(), (
                f"ids {ids[index].tolist()} are {short_of.max():.3g} from the likeliest"
            )

    def _rewind(self, twin: Twin, call: Call) -> None:
        """Keys: n, one number or one per row."""
        n, rows = call["n"], twin.rows
        fits = isinstance(n, int) or len(n) == max(len(rows), 1)
        back = [n] * max(len(rows), 1) if isinstance(n, int) else list(n)
        held = [row.length for row in rows] or [0]
        outside = any(not 0 <= count <= most for count, most in zip(back, held, strict=False))
        wrong = not self.subject.cached or not fits or outside
        pairs = [*zip(back, rows, strict=False)]
        forgotten = any(not row.remembers(count) for count, row in pairs)
        if not wrong and forgotten and (self.subject.windows or self.subject.replaces):
            wrong = not can_rewind(twin.session, n)
        if wrong:
            self._must_refuse(twin, lambda: twin.session.rewind(n))
            return
        twin.session.rewind(n)
        for row, count in zip(rows, back, strict=False):
            row.back(count)

    def _fork(self, twin: Twin, call: Call) -> None:
        other = Twin(twin.session.fork(), [row.copy() for row in twin.rows])
        self.twins = [*self.twins[: SESSIONS - 1], other]

    def _admit(self, twin: Twin, call: Call) -> None:
        """Keys: rows, start, padding, chunk, keep, as for `_prefill`."""
        more, starts = self._asked(call)
        found = [] if starts is None else [*zip(starts, self._sources(len(starts)), strict=True)]
        rows = [Reading(int(start), self.limit, source=source) for start, source in found]
        arguments, columns = self._given(call, more, rows)
        if self.subject.encoded:
            arguments["encoder"] = [self.subject.encoded[row.source] for row in rows]
        never = not self.subject.cached or self.subject.columns
        if never or starts is None or not all(more) or self._beyond(rows, more):
            self._must_refuse(twin, lambda: twin.session.admit(**arguments))
            return
        self._take(rows, more, call, twin.session.admit(**arguments), columns)
        twin.rows += rows

    def _begin(self, twin: Twin, call: Call) -> None:
        """Keys: row, whose caches are kept; cut, the number of its tokens with which a new row
        begins; rows, what follows, one entry; padding, chunk, keep.
        """
        if self.prefixes is None or call["row"] >= len(twin.rows):
            return
        known = twin.rows[call["row"]]
        key, ids = str(known.source), list(map(identity, known.tokens))
        share = functools.partial(twin.session.share, call["row"], ids, self.prefixes, key)
        if known.start:
            self._must_refuse(twin, share)
            return
        share()
        ((text, beside, count),) = call["rows"]
        whole = [*known.tokens[: call["cut"]], *[self._token(text, beside)] * count]
        prefix = self.prefixes.find(list(map(identity, whole)), key)
        row = Reading(0, self.limit, whole[: prefix.length], source=known.source)
        more = [whole[prefix.length :]]
        arguments, columns = self._given({**call, "start": None}, more, [row])
        arguments |= {"encoder": [self.subject.encoded[row.source]]} if self.subject.encoded else {}
        if self._beyond([row], more) or not all(more):
            self._must_refuse(twin, lambda: twin.session.admit(**arguments, prefix=prefix))
            return
        self._take([row], more, call, twin.session.admit(**arguments, prefix=prefix), columns)
        twin.rows.append(row)

    def _retire(self, twin: Twin, call: Call) -> None:
        """Keys: row."""
        if not self.subject.cached or self.subject.columns or call["row"] >= len(twin.rows):
            self._must_refuse(twin, lambda: twin.session.retire(call["row"]))
            return
        twin.session.retire(call["row"])
        twin.rows[call["row"]] = twin.rows[-1]
        twin.rows.pop()

    def _reset(self, twin: Twin, call: Call) -> None:
        twin.session.reset()
        twin.rows = []

    def _wrong(self, twin: Twin, call: Call) -> None:
        """Keys: name, a name of tests.fuzz.wrong."""
        wrong = wrong_calls(self.subject)[call["name"]]
        self._must_refuse(twin, lambda: wrong(self.subject, twin.session))

    def _token(self, text: int, beside: int) -> Token:
        return Token(text % TEXTS, beside if self.manifest.axes else -1)

    def _must_refuse(self, twin: Twin, make: Callable[[], Any]) -> None:
        """Check that a call is refused with a message of one line, and that the session is
        unchanged.
        """
        self.refused += 1
        try:
            make()
        except ValueError as error:
            line = str(error)
            assert line.startswith("session: ") and "\n" not in line and len(line) < 1000, (
                f"expected a refusal of one line, got {line!r}"
            )
        else:
            raise AssertionError("expected a refusal, got an answer")
        self._check_lengths(twin)
        self._look_ahead(twin)

    def _look_ahead(self, twin: Twin) -> None:
        """Fork the session and check a step of the fork, if there is room for one."""
        rows = [row.copy() for row in twin.rows]
        if not self.subject.cached or not rows or self._beyond(rows, [[Token(0)]] * len(rows)):
            return
        ahead = {"do": "step ahead", "times": 1, "texts": [0], "copy": True}
        self._step(Twin(twin.session.fork(), rows), ahead)

    def _check_lengths(self, twin: Twin) -> None:
        session, rows = twin.session, twin.rows
        assert session.batch == len(rows), f"expected {len(rows)} rows, got {session.batch}"
        assert session.length.tolist() == [row.length for row in rows], (
            f"expected lengths {[row.length for row in rows]}, got {session.length.tolist()}"
        )
        assert session.position.tolist() == [row.start + row.length for row in rows], (
            f"got positions {session.position.tolist()}"
        )

    def _compare(self, output: np.ndarray, row: Reading, first: int, call: Call) -> None:
        """Check the outputs of a row from its token `first` on."""
        read = row.start, row.tokens, row.source
        part = slice(first, row.length)
        for name, (full, against) in self.subject.expected(*read).items():
            bound = against.bound * (against.of_few if len(output) < MANY else 1)
            error = against.error(output, full, part)
            if error > bound:
                explained = self.subject.explained(*read, against, part)
                self.explained += error <= explained
                bound = max(bound, explained)
            self.worst[name] = max(self.worst.get(name, 0.0), error / bound)
            tokens = f"a row from position {row.start}, its tokens {first} .. {row.length - 1}"
            found = f"error {error / bound:.3g} of {bound:.2g} against {name}"
            assert error <= bound, f"{call['do']}: {tokens}: {found}"

    def _own(self, output: np.ndarray) -> None:
        self.owned = [*self.owned, (output, output.copy())][-WATCHED:]


def replay(subject: Subject, options: dict[str, Any], calls: Sequence[Call]) -> Driver:
    """Make calls in order, then check that every session can continue."""
    driver = Driver(subject, options)
    for call in calls:
        driver.apply(call)
    driver.close()
    return driver
