"""A hypothesis state machine that makes random calls on sessions of one artefact."""

from typing import Any, Callable, Dict, List, Optional, Type

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
    record: Dict[str, Any]
    total: Dict[str, Any]

    @initialize(
        batch=st.integers(1, 3),
        capacity=st.one_of(st.none(), st.integers(8, 40)),
        rewind=st.sampled_from([256, 4, 20]),
    )
    def open(self, batch: int, capacity: Optional[int], rewind: int) -> None:
        options = {"batch": batch, "capacity": capacity, "rewind": rewind}
        self.driver = Driver(self.subject, options)
        type(self).record = {"spec": list(self.subject.spec), "options": options, "calls": []}
        self.total["sequences"] += 1

    def make(self, call: Call) -> None:
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
    ) -> List[List[int]]:
        few = st.integers(min(least, room), min(7, room))
        tokens = st.one_of(
            few, few, few, st.integers(min(least, room), room), st.integers(0, room + 2)
        )
        beside = st.integers(-1, TEXTS - 1) if self.driver.manifest.axes else st.just(-1)
        return [[draw(st.integers(0, TEXTS - 1)), draw(beside), draw(tokens)] for _ in range(count)]

    def drawn_start(self, draw: Callable[[Any], Any], count: int) -> Any:
        """Draw start positions: None, one number or one per row, up to the end of the range."""
        one = st.one_of(
            st.integers(0, 9),
            st.integers(0, self.subject.spec.size - 1),
            st.just(self.subject.spec.size - 1),
        )
        return draw(st.one_of(st.none(), one, st.lists(one, min_size=count, max_size=count)))

    def common(self, draw: Callable[[Any], Any]) -> Dict[str, Any]:
        chunk = draw(st.one_of(st.none(), st.sampled_from([1, 2, 3, 5, 16, 10**6])))
        return {
            "padding": draw(st.one_of(st.none(), st.integers(0, 99))),
            "chunk": chunk,
            "keep": draw(st.sampled_from([None, None, 0, 1, 1, 3, 40])),
        }

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
        self.make({"do": "prefill", "on": on, "rows": rows, "start": start, **self.common(draw)})

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
        if (
            twin.rows and not room and data.draw(st.integers(0, 7))
        ):  # no position is left: rewind all rows
            self.make({"do": "rewind", "on": on, "n": [row.length for row in twin.rows]})
            return
        times = data.draw(
            st.one_of(
                st.integers(1, max(min(5, room), 1)),
                st.integers(1, max(min(40, room), 1)),
                st.integers(1, 40),
            )
        )
        texts = data.draw(
            st.lists(st.integers(0, TEXTS - 1), min_size=1, max_size=max(len(twin.rows), 1))
        )
        self.make(
            {
                "do": "step",
                "on": on,
                "times": times,
                "texts": texts,
                "copy": data.draw(st.booleans()),
            }
        )

    @rule(data=st.data())
    def speculate(self, data: Any) -> None:
        if self.instead(data, self.subject.cached and self.driver.manifest.kind == "decoder"):
            return
        on, twin = self.choose(data.draw)
        texts = data.draw(
            st.lists(st.integers(0, TEXTS - 1), min_size=1, max_size=max(len(twin.rows), 1))
        )
        self.make(
            {
                "do": "speculate",
                "on": on,
                "times": data.draw(st.integers(1, max(min(24, self.room(twin)), 1))),
                "texts": texts,
            }
        )

    @rule(data=st.data())
    def rewind(self, data: Any) -> None:
        if self.instead(data, self.subject.cached):
            return
        on, twin = self.choose(data.draw)
        held = [row.length for row in twin.rows]
        least, most = min(held, default=0), max(held, default=0)
        one = st.one_of(
            st.integers(0, min(4, least)), st.integers(0, least), st.integers(0, most + 1)
        )
        each = st.tuples(
            *(
                st.one_of(st.integers(0, min(4, count)), st.integers(0, count))
                for count in held or [0]
            )
        )
        n = data.draw(st.one_of(one, each))
        self.make({"do": "rewind", "on": on, "n": n if isinstance(n, int) else list(n)})

    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        self.make({"do": "fork", "on": self.choose(data.draw)[0]})

    @rule(data=st.data())
    def admit(self, data: Any) -> None:
        if self.instead(data, self.subject.cached and not self.subject.columns):
            return
        on, twin = self.choose(data.draw)
        count = data.draw(st.integers(1, 2))
        start = self.drawn_start(data.draw, count)
        ends = [
            self.subject.spec.size - int(first)
            for first in ([0] if start is None else [start] if isinstance(start, int) else start)
        ]
        rows = self.drawn_rows(data.draw, count, min([*ends, self.driver.capacity]), 1)
        self.make({"do": "admit", "on": on, "rows": rows, "start": start, **self.common(data.draw)})

    @rule(data=st.data())
    def begin(self, data: Any) -> None:
        on, twin = self.choose(data.draw)
        if self.driver.prefixes is None or not twin.rows:
            self._drawn_prefill(data.draw)
            return
        row = data.draw(st.integers(0, len(twin.rows) - 1))
        cut = data.draw(
            st.one_of(st.just(twin.rows[row].length), st.integers(0, twin.rows[row].length))
        )
        rows = self.drawn_rows(
            data.draw, 1, max(min(self.subject.spec.size, self.driver.capacity) - cut, 0), 1
        )
        self.make(
            {
                "do": "begin",
                "on": on,
                "row": row,
                "cut": cut,
                "rows": rows,
                **self.common(data.draw),
            }
        )

    @rule(data=st.data())
    def retire(self, data: Any) -> None:
        if self.instead(data, self.subject.cached and not self.subject.columns):
            return
        on, twin = self.choose(data.draw)
        self.make(
            {"do": "retire", "on": on, "row": data.draw(st.integers(0, max(len(twin.rows) - 1, 0)))}
        )

    @rule(data=st.data())
    def reset(self, data: Any) -> None:
        self.make({"do": "reset", "on": self.choose(data.draw)[0]})

    @rule(data=st.data())
    def wrong(self, data: Any) -> None:
        if self.instead(data, data.draw(st.booleans())):
            return
        self.make(
            {
                "do": "wrong",
                "on": self.choose(data.draw)[0],
                "name": data.draw(st.sampled_from(sorted(wrong_calls(self.subject)))),
            }
        )


def machine_of(subject: Subject) -> Type[Machine]:
    """Return a new subclass of Machine for a subject, with all totals at zero."""
    total = {"sequences": 0, **dict.fromkeys(COUNTED, 0), "worst": {}}
    return type("Sessions", (Machine,), {"subject": subject, "record": {}, "total": total})
