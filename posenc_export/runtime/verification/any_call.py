"""A call of an artefact with any numbers of rows, tokens and slots, for the solver z3.

Shapes: B rows, S new tokens, P slots of caches that a call is given, T keys of a call.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np
import z3

from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.verification import described
from posenc_export.runtime.verification.symbolic import (
    SOLVER,
    Solver,
    Tensor,
    Untranslated,
    both,
    choose,
)
from posenc_export.shared.places import evaluate
from posenc_export.shared.refusal import refusal

Sum = tuple[str, Tensor, Tensor]  # operator, what it adds up, and the result


@dataclass(frozen=True)
class Keys:
    """The keys that attention nodes read, and how rows lie in their caches."""

    count: Any  # T
    at: Callable[[Any, Any], Any]  # position of the key in a slot of a row, -1 where there is none
    start: Callable[[Any], Any]  # token of a row in its first slot
    longest: Any  # slots of the longest row


class AnyCall:
    """The inputs of a graph as functions of any row, column and slot, and facts that a session
    ensures: positions are -1 or in range, the tokens of a row fill its first slots, and new tokens
    have room.

    Args:
        manifest: of the artefact.
        log: as for Solver.

    Attributes:
        solver: answers questions on these calls.
        tensors: inputs and states by name.
        sums: known results of sums, as for Translation.
        keys, windows: keys in caches of all tokens, and in caches of windows.
    """

    def __init__(self, manifest: Manifest, log: Path | None = None) -> None:
        self.manifest, self.most = manifest, manifest.max_positions
        self.solver = Solver(log)
        self.by_mask, self.caches = manifest.signature == "mask", described.has_cache(manifest)
        self.rows, self.columns, self.slots, self.capacity, self.of_window = z3.Ints("B S P C W")
        self.row, self.column, self.slot, self.token = z3.Ints("row column slot token")
        self.plane, self.requested_count = z3.Int("plane"), z3.Int("R")
        self.total, self.least_cached = z3.Int("longest"), z3.Int("fewest cached")
        room = self.most + manifest.capacity_bucket
        assumed = self.solver.assumed = [self.rows >= 1, self.columns >= 1, self.slots >= 0]
        assumed += [size <= room for size in (self.columns, self.slots, self.capacity)]
        self.sums: list[Sum] = []
        self.listed = False  # whether `inputs` lists the facts of all columns
        self._names: dict[bool, dict[str, Any]] = {}  # names in rules, with and without windows
        self.tensors: dict[str, Tensor] = {}
        self.keys = self._keys()
        self.windows = self._windows()
        kept = Tensor(
            (self.rows, self.columns), lambda i: choose(self.query(i[0], i[1]) >= 0, 1, 0)
        )
        cached = Tensor((self.rows,), lambda i: self.cached(i[0]))
        positions = Tensor((self.rows, self.columns), lambda i: self.query(*i))
        self.largest = self.solver.function(
            "largest_position",
            lambda p, b: z3.And(self._in_range(p), not self.by_mask or p < self.total),
        )
        largest = Tensor((self.rows,), lambda i: self.largest(i[0]))
        self.sums.append(("ReduceMax", positions, largest))
        self.sums.append(("ReduceSum", kept, Tensor((self.rows,), lambda i: self.new(i[0]))))
        self.sums.append(("ReduceMin", cached, Tensor((), lambda i: self.least_cached)))
        self._feed()

    def _in_range(self, value: Any) -> Any:
        return z3.And(value >= -1, value < self.most)

    def _keys(self) -> Keys:
        """Define positions of tokens and keys, by the signature and the layout of the caches."""
        S, P, manifest = self.columns, self.slots, self.manifest
        in_place = self.caches and manifest.in_place
        consecutive = manifest.contiguous and not self.by_mask and (in_place or not self.caches)
        room = self.most if not in_place or manifest.contiguous else self.capacity - S
        self.cached = self.solver.function(
            "cached", lambda n, b: z3.And(n >= 0, n >= self.least_cached, n <= room)
        )
        if not self.caches:
            self.cached, self.least_cached, self.total = lambda b: 0, z3.IntVal(0), S
        self.new = self.solver.function(
            "new",
            lambda n, b: z3.And(
                n >= 0, n <= S, not consecutive or self.cached(b) + n <= self.total
            ),
        )
        used = lambda b: self.cached(b) + self.new(b)  # noqa: E731
        self.last = lambda b: z3.If(used(b) > 0, used(b) - 1, 0)
        if self.by_mask:
            return self._by_mask(in_place)
        if consecutive:
            return self._consecutive()
        self.query = self.solver.function("position", lambda q, b, i: self._in_range(q))
        if not self.caches:
            return Keys(S, self.query, lambda b: 0, S)
        if not in_place:
            self.past = self.solver.function("past_position", lambda k, b, s: self._in_range(k))
            joined = lambda b, t: choose(t < P, self.past(b, t), self.query(b, t - P))  # noqa: E731
            return Keys(P + S, joined, lambda b: 0, P + S)
        self.past = self.solver.function(
            "past_position",
            lambda k, b, s: z3.And(self._in_range(k), (k >= 0) == both(s >= 0, s < self.cached(b))),
        )
        self.solver.assumed.append(self.capacity >= 1)

        def written(b: Any, t: Any) -> Any:
            place = t - self.cached(b)
            inside = both(place >= 0, place < S)
            return choose(inside, self.query(b, place), self.past(b, t))

        self.sums.append(
            (
                "ReduceSum",
                Tensor((self.rows, self.capacity), lambda i: choose(self.past(*i) >= 0, 1, 0)),
                Tensor((self.rows,), lambda i: self.cached(i[0])),
            )
        )
        return Keys(self.capacity, written, lambda b: 0, self.capacity)

    def _by_mask(self, in_place: bool) -> Keys:
        """Define positions that are counted from a mask of past and new columns [B,T]."""
        S, P, manifest = self.columns, self.slots, self.manifest
        total = z3.simplify(P + S) if self.caches else S
        self.mask = self.solver.function("mask", lambda m, b, t: z3.Or(m == -1, m == 1))
        points: list[tuple[Any, Any, Any]] = []  # rows and columns up to which tokens were counted

        def promise(count: Any, b: Any, t: Any) -> Any:
            facts = [count >= self._kept(b, t), count <= self.most, z3.Or(t < 0, count <= t + 1)]
            if self.listed:  # `_counts` says how they differ
                return z3.And(facts)
            for row, other, fewer in points:
                up = z3.And(fewer + self._kept(b, t) <= count, count - fewer <= t - other)
                down = z3.And(count + self._kept(row, other) <= fewer, fewer - count <= other - t)
                facts.append(z3.Implies(z3.And(row == b, other < t), up))
                facts.append(z3.Implies(z3.And(row == b, t < other), down))
            points.append((b, t, count))
            return z3.And(facts)

        counted = self.counted = self.solver.function("tokens_up_to", promise)
        kept = Tensor((self.rows, total), lambda i: self._kept(*i))
        self.sums.append(("CumSum", kept, Tensor(kept.shape, lambda i: counted(*i))))

        def position(b: Any, t: Any) -> Any:
            return choose(self.mask(b, t) > 0, counted(b, t) - 1, -1)

        self.total = total
        self.query = lambda b, i: position(b, total - S + i)
        self.cached, self.last = lambda b: self.least_cached, lambda b: total - 1
        self.least_cached = P if self.caches else z3.IntVal(0)
        if in_place and not manifest.contiguous:
            self.solver.assumed.append(self.capacity >= total)
            inside = lambda b, t: choose(t < total, position(b, t), -1)  # noqa: E731
            return Keys(self.capacity, inside, lambda b: 0, total)
        return Keys(total, position, lambda b: 0, total)

    def _kept(self, b: Any, t: Any) -> Any:
        """Return 1 for a token of the mask, and 0 for padding."""
        return choose(self.mask(b, t) > 0, 1, 0)

    def _consecutive(self) -> Keys:
        """Define consecutive positions of each row from its first slot on."""
        self.first = self.solver.function(
            "first_position",
            lambda p, b: z3.And(p >= 0, p + self.cached(b) + self.new(b) <= self.most),
        )
        self.solver.assumed += [self.total >= 1, self.total <= self.capacity]

        def query(b: Any, i: Any) -> Any:
            inside = both(i >= 0, i < self.new(b))
            return choose(inside, self.first(b) + self.cached(b) + i, -1)

        def key(b: Any, t: Any) -> Any:
            position = self.first(b) + t
            return choose(position < self.most, position, -1)

        self.query = query
        return Keys(self.total, key if self.caches else query, lambda b: 0, self.total)

    def _windows(self) -> Keys:
        """Define keys of caches of windows, which begin at some token of each row."""
        count, keys, contiguous = self.of_window, self.keys, self.manifest.contiguous

        def promise(w: Any, b: Any) -> Any:
            used = self.last(b) - w < count if contiguous else self.cached(b) - w <= count - S
            return z3.And(w >= 0, w <= self.cached(b), w <= self.last(b), used)

        start, S = self.solver.function("window_start", promise), self.columns
        self.solver.assumed.append(count >= 1)
        if contiguous:
            gone = Tensor((self.rows,), lambda i: self.last(i[0]) - start(i[0]))
            self.sums.append(("ReduceMax", gone, Tensor((), lambda i: count - 1)))
            return Keys(count, lambda b, t: keys.at(b, start(b) + t), start, count)

        def key(b: Any, t: Any) -> Any:
            slot = start(b) + t
            return choose(slot < keys.count, keys.at(b, slot), -1)

        return Keys(count, key, start, count)

    def _feed(self) -> None:
        """Define the inputs of the graph."""
        B, S, manifest = self.rows, self.columns, self.manifest
        total = self.total if self.by_mask or manifest.contiguous else self.keys.count
        sizes = {
            "batch_size": B,
            "sequence_length": S,
            "capacity": self.capacity,
            "window_capacity": z3.Int("window_capacity"),
            "past_sequence_length": self.slots,
            "total_sequence_length": total,
            "encoder_sequence_length": z3.Int("encoder_tokens"),
            "logits_count": self.requested_count,
        }
        if not manifest.contiguous:
            sizes["window_capacity"] = self.of_window
        most = manifest.coordinate_range or self.most
        planes = [
            self.solver.function(f"x{axis}", lambda x, b, i: z3.And(x >= 0, x < most))
            for axis in range(manifest.axes)
        ]
        self.coordinates = planes

        def ids(index: Sequence[Any]) -> Any:
            return _of_plane([self.query, *planes], *index) if planes else self.query(*index)

        self.requested = self.solver.function("requested", lambda c, b, r: z3.And(c >= 0, c < S))
        entries: dict[str, Callable[[Sequence[Any]], Any]] = {
            "position_ids": ids,
            "attention_mask": lambda i: self.mask(*i),
            "past_positions": lambda i: self.past(*i),
            "cache_position": lambda i: self.cached(i[0]) + i[1],
            "first_position": lambda i: self.first(i[0]),
            "seqlens_k": lambda i: self.last(i[0]),
            "total_sequence_length": lambda i: self.total,
            "window_start": lambda i: self.windows.start(i[0]),
            "slots": lambda i: i[0],
            "logits_index": lambda i: self.requested(*i),
        }
        of_call = {value.name: value for value in (*manifest.inputs, *manifest.encoder)}
        values = {name: value.axes for name, value in of_call.items()}
        values |= {state.past: state.axes for state in manifest.states}
        self.integers = {name: of_call[name].dtype for name in of_call.keys() & entries.keys()}
        if manifest.stores_positions:
            self.integers["past_positions"] = "int64"
        for name, axes in values.items():
            shape = [sizes.get(n) if isinstance(n, str) else n for n in axes]
            shape = [z3.Int(str(n)) if s is None else s for n, s in zip(axes, shape, strict=True)]
            self.tensors[name] = Tensor(shape, entries.get(name, values_of(name)))

    def named(self, in_windows: bool) -> dict[str, Any]:
        """Return the values of names in rules, for any row, column and slot."""
        keys, b, i, t = self.windows if in_windows else self.keys, self.row, self.column, self.slot
        start = keys.start(b)
        planes = {f"x{axis}": plane(b, i) for axis, plane in enumerate(self.coordinates)}
        if planes:
            planes["x"] = _of_plane(self.coordinates, self.plane, b, i)
        return {
            **planes,
            "q": self.query(b, i),
            "slot": self.cached(b) + i - start,
            "k": keys.at(b, t),
            "row": b,
            "first": self.cached(b) - start,
            "last": self.last(b) - start,
            "largest": self.largest(b),
            "longest": keys.longest,
            "requested": self.requested(b, self.token),
        }

    def smallest(self, *facts: Any) -> z3.ModelRef | None:
        """Return one of the smallest calls in which facts hold (Solver.smallest)."""
        return self.solver.smallest(self.sizes, *facts)

    @property
    def sizes(self) -> list[Any]:
        """The sizes of a call, beginning with the number of keys."""
        of_caches = (self.slots, self.capacity, self.of_window)
        return [self.total, self.columns, *of_caches, self.requested_count, self.rows, self.row]

    def inputs(self, *facts: Any) -> tuple[z3.ModelRef, dict[str, np.ndarray]]:
        """Return one of the smallest calls in which facts hold, and its graph inputs by name, which
        a session could feed. Raise ValueError if there is no such call.
        """
        with self.solver.apart():
            self.listed = True
            try:
                return self._inputs(*facts)
            finally:
                self.listed = False

    def _inputs(self, *facts: Any) -> tuple[z3.ModelRef, dict[str, np.ndarray]]:
        model = self.smallest(*facts)
        if model is None:
            raise refusal("claims", "facts that hold in a call", "none")
        chosen = [n == model.eval(n, True) for n in self.sizes]
        shapes = {
            name: [model.eval(z3.IntVal(0) + n, True).as_long() for n in tensor.shape]
            for name, tensor in self.tensors.items()
        }
        entries = {
            name: [self.tensors[name].made(index) for index in np.ndindex(*shapes[name])]
            for name in self.integers
        }
        count, columns = (model.eval(n, True).as_long() for n in (self.rows, self.columns))
        for b in range(count):  # the entries that sums add up
            positions = [self.query(b, i) for i in range(columns)]
            tokens = [choose(position >= 0, 1, 0) for position in positions]
            chosen += [self.new(b) == z3.Sum(tokens), *self._counts(b, model)]
            chosen += [self.largest(b) >= position for position in positions]
            chosen.append(z3.Or([self.largest(b) == position for position in positions]))
        chosen.append(z3.Or([self.least_cached == self.cached(b) for b in range(count)]))
        if self.manifest.contiguous and not self.by_mask:
            chosen.append(z3.Or([self.total == self.last(b) + 1 for b in range(count)]))
        if self.manifest.contiguous and "window_start" in self.tensors:
            used = [self.last(b) + 1 - self.windows.start(b) for b in range(count)]
            chosen.append(z3.Or([self.of_window == n for n in used]))
        whole = self.solver.model(*facts, *chosen)
        if whole is None:
            raise refusal("claims", "facts that hold in a call", "none that a session makes")
        arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        for name, of in entries.items():
            numbers = [whole.eval(z3.IntVal(0) + entry, True).as_long() for entry in of]
            arrays[name] = np.array(numbers, self.integers[name]).reshape(shapes[name])
        return whole, arrays

    def _counts(self, b: int, model: z3.ModelRef) -> list[Any]:
        """Return facts: the count grows by one with each token of a mask."""
        if not self.by_mask:
            return []
        columns = range(model.eval(z3.IntVal(0) + self.total, True).as_long())
        counts = [self.counted(b, t) for t in columns]
        before = [z3.IntVal(0), *counts]
        pairs = enumerate(zip(before, counts, strict=False))
        return [n == m + self._kept(b, t) for t, (m, n) in pairs]

    def rule(self, text: str, in_windows: bool = False, of_keys: bool = False) -> Any:
        """Return the value of a rule for any row, column and slot; of_keys: with the token and the
        key exchanged.
        """
        if in_windows not in self._names:
            self._names[in_windows] = self.named(in_windows)
        names = self._names[in_windows]
        exchanged = {"q": names["k"], "k": names["q"]} if of_keys else {}
        return evaluate(text, {**names, **exchanged}, SOLVER)


def _of_plane(planes: Sequence[Callable[[Any, Any], Any]], number: Any, b: Any, i: Any) -> Any:
    """Return the value at a row and a column of the function with this number."""
    value = planes[-1](b, i)
    for index, plane in enumerate(planes[:-1]):
        value = choose(number == index, plane(b, i), value)
    return value


def values_of(name: str) -> Callable[[Sequence[Any]], Any]:
    def at(index: Sequence[Any]) -> Any:
        raise Untranslated(f"depends on the values of {name}")

    return at
