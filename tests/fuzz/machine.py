"""A hypothesis state machine that makes random calls on sessions of one artefact."""

from typing import Any, Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.fuzz.driver import Call, Driver, Twin
from tests.fuzz.subjects import TEXTS, Subject
from tests.fuzz.wrong import wrong_calls

COUNTED = ("calls", "steps", "refused", "explained")


class Machine(RuleBasedStateMachine):
    """Draws calls that are allowed in the current state, and sometimes calls that must be refused.

    Attributes:
        subject: the artefact; set by `machine_of`.
        record: options and calls of the last sequence; after shrinking, this is the smallest
            failing sequence.
        total: numbers of sequences, calls, steps, refusals and errors beyond a bound that rounding
            explains so far, and the worst errors relative to their bounds, by reference.
    """

    subject: Subject
    record: dict[str, Any]
    total: dict[str, Any]

    @initialize(
        batch=st.integers(1, 3),
        capacity=st.one_of(st.none(), st.integers(8, 40)),
        rewind=st.sampled_from([256, 4, 20]),
    )
    def open(self, batch: int, capacity: int | None, rewind: int) -> None:
        options = {"batch": batch, "capacity": capacity, "rewind": rewind}
        self.driver = Driver(self.subject, options)
        type(self).record = {"spec": list(self.subject.spec), "options": options, "calls": []}
        self.total["sequences"] += 1

    def make(self, do: str, on: int, **keys: Any) -> None:
        call: Call = {"do": do, "on": on, **keys}
        self.record["calls"].append(call)
        driver = self.__dict__.pop("driver")  # teardown checks it only if the call is right
        before = {name: getattr(driver, name) for name in COUNTED}
        driver.apply(call)
        self.driver = driver
        for name in COUNTED:
            self.total[name] += getattr(driver, name) - before[name]
        worst = self.total["worst"]
        worst |= {name: max(error, worst.get(name, 0.0)) for name, error in driver.worst.items()}

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.record["calls"].append({"do": "close"})
            self.driver.close()
            self.record["calls"].pop()

    def choose(self, draw: Callable[[Any], Any]) -> "tuple[int, Twin]":
        on = draw(st.integers(0, len(self.driver.twins) - 1))
        return on, self.driver.twins[on]

    def room(self, twin: Twin) -> int:
        """Return the number of tokens that every row has room for."""
        ends = [
            min(self.subject.spec.size - row.start, self.driver.capacity) - row.length
            for row in twin.rows
        ]
        return max(min(ends, default=min(self.subject.spec.size, self.driver.capacity)), 0)

    def drawn_rows(
        self, draw: Callable[[Any], Any], count: int, room: int, least: int
    ) -> list[list[int]]:
        first = min(least, room)
        few, some = st.integers(first, min(7, room)), st.integers(first, room)
        tokens = st.one_of(few, few, few, some, st.integers(0, room + 2))
        beside = st.integers(-1, TEXTS - 1) if self.driver.manifest.axes else st.just(-1)
        return [[draw(st.integers(0, TEXTS - 1)), draw(beside), draw(tokens)] for _ in range(count)]

    def drawn_start(self, draw: Callable[[Any], Any], count: int) -> Any:
        """Draw start positions: None, one number or one per row, up to the end of the range."""
        last = self.subject.spec.size - 1
        one = st.one_of(st.integers(0, 9), st.integers(0, last), st.just(last))
        return draw(st.one_of(st.none(), one, st.lists(one, min_size=count, max_size=count)))

    def common(self, draw: Callable[[Any], Any]) -> dict[str, Any]:
        chunk = draw(st.one_of(st.none(), st.sampled_from([1, 2, 3, 5, 16, 10**6])))
        padding = draw(st.one_of(st.none(), st.integers(0, 99)))
        keep = draw(st.sampled_from([None, None, 0, 1, 1, 3, 40]))
        return {"padding": padding, "chunk": chunk, "keep": keep}

    @rule(data=st.data())
    def prefill(self, data: Any) -> None:
        self._drawn_prefill(data.draw)

    def _drawn_prefill(self, draw: Callable[[Any], Any]) -> None:
        on, twin = self.choose(draw)
        held = any(row.length for row in twin.rows)
        count = len(twin.rows) if held and self.subject.cached else draw(st.integers(1, 4))
        count += int(draw(st.integers(0, 19)) == 19)  # a wrong count of rows
        room = self.room(twin) if self.subject.cached else self.subject.spec.size
        rows = self.drawn_rows(draw, count, room, 0)
        if (held and self.subject.cached) or self.driver.manifest.signature == "mask":
            following = [row.start + row.length for row in twin.rows]
            start = draw(st.sampled_from([None, None, None, 0, following, None, 1]))
        else:
            start = self.drawn_start(draw, count)
        self.make("prefill", on, rows=rows, start=start, **self.common(draw))

    def instead(self, data: Any, possible: bool) -> bool:
        """Make a prefill instead of a call that is always refused, except in one case of eight.
        Return whether a prefill was made.
        """
        if possible or not data.draw(st.integers(0, 7)):
            return False
        self._drawn_prefill(data.draw)
        return True

    @rule(data=st.data())
    def step(self, data: Any) -> None:
        if self.instead(data, self.subject.cached):
            return
        on, twin = self.choose(data.draw)
        room = self.room(twin)
        # No position is left: rewind all rows.
        if twin.rows and not room and data.draw(st.integers(0, 7)):
            self.make("rewind", on, n=[row.length for row in twin.rows])
            return
        few, many = (st.integers(1, max(min(most, room), 1)) for most in (5, 40))
        times = data.draw(st.one_of(few, many, st.integers(1, 40)))
        copy = data.draw(st.booleans())
        self.make("step", on, times=times, texts=self.texts(data.draw, twin), copy=copy)

    def texts(self, draw: Callable[[Any], Any], twin: Twin) -> list[int]:
        """Draw the texts of which each row reads a token."""
        most = max(len(twin.rows), 1)
        return draw(st.lists(st.integers(0, TEXTS - 1), min_size=1, max_size=most))  # type: ignore[no-any-return]

    @rule(data=st.data())
    def speculate(self, data: Any) -> None:
        if self.instead(data, self.subject.cached and self.driver.manifest.kind == "decoder"):
            return
        on, twin = self.choose(data.draw)
        times = data.draw(st.integers(1, max(min(24, self.room(twin)), 1)))
        self.make("speculate", on, times=times, texts=self.texts(data.draw, twin))

    @rule(data=st.data())
    def rewind(self, data: Any) -> None:
        if self.instead(data, self.subject.cached):
            return
        on, twin = self.choose(data.draw)
        held = [row.length for row in twin.rows]
        least, most = min(held, default=0), max(held, default=0)

        def within(count: int) -> Any:
            return st.one_of(st.integers(0, min(4, count)), st.integers(0, count))

        one = st.one_of(within(least), st.integers(0, most + 1))
        n = data.draw(st.one_of(one, st.tuples(*map(within, held or [0]))))
        self.make("rewind", on, n=n if isinstance(n, int) else list(n))

    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        self.make("fork", self.choose(data.draw)[0])

    @rule(data=st.data())
    def admit(self, data: Any) -> None:
        if self.instead(data, self.subject.cached and not self.subject.columns):
            return
        on, twin = self.choose(data.draw)
        count = data.draw(st.integers(1, 2))
        start = self.drawn_start(data.draw, count)
        last = max(start) if isinstance(start, list) else start or 0
        room = min(self.subject.spec.size - last, self.driver.capacity)
        rows = self.drawn_rows(data.draw, count, room, 1)
        self.make("admit", on, rows=rows, start=start, **self.common(data.draw))

    @rule(data=st.data())
    def begin(self, data: Any) -> None:
        on, twin = self.choose(data.draw)
        if self.driver.prefixes is None or not twin.rows:
            self._drawn_prefill(data.draw)
            return
        row = data.draw(st.integers(0, len(twin.rows) - 1))
        length = twin.rows[row].length
        cut = data.draw(st.one_of(st.just(length), st.integers(0, length)))
        room = max(min(self.subject.spec.size, self.driver.capacity) - cut, 0)
        rows = self.drawn_rows(data.draw, 1, room, 1)
        self.make("begin", on, row=row, cut=cut, rows=rows, **self.common(data.draw))

    @rule(data=st.data())
    def retire(self, data: Any) -> None:
        if self.instead(data, self.subject.cached and not self.subject.columns):
            return
        on, twin = self.choose(data.draw)
        self.make("retire", on, row=data.draw(st.integers(0, max(len(twin.rows) - 1, 0))))

    @rule(data=st.data())
    def reset(self, data: Any) -> None:
        self.make("reset", self.choose(data.draw)[0])

    @rule(data=st.data())
    def wrong(self, data: Any) -> None:
        if self.instead(data, data.draw(st.booleans())):
            return
        name = data.draw(st.sampled_from(sorted(wrong_calls(self.subject))))
        self.make("wrong", self.choose(data.draw)[0], name=name)


def machine_of(subject: Subject) -> type[Machine]:
    """Return a new subclass of Machine for a subject, with all totals at zero."""
    total = {"sequences": 0, **dict.fromkeys(COUNTED, 0), "worst": {}}
    return type("Sessions", (Machine,), {"subject": subject, "record": {}, "total": total})
