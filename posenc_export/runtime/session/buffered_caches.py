"""Buffers that hold the caches of a session, for graphs of every runtime."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Protocol, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, State
from posenc_export.runtime.session.buffer import Buffer
from posenc_export.runtime.session.state import Call, Feeds, Slots, Step

GROWTH = 256  # slots added at a time to buffers of growing caches


class Graph(Protocol):
    """A loaded graph.

    Attributes:
        manifest: manifest of the artefact.
        provider: provider that runs the graph, a name that `load` takes.
        device: device of the buffers, "cpu" or "cuda".
        strided: whether the graph accepts a view of the first slots of a buffer. Other graphs are
            given whole buffers.
    """

    manifest: Manifest
    provider: str
    device: str
    strided: bool

    def open(self, rows: int, capacity: int) -> "BufferedCaches":
        """Allocate empty caches for `rows` rows of `capacity` slots."""

    def run(self, caches: "BufferedCaches", call: Call) -> np.ndarray:
        """Run the graph on a call and return its output [rows,S,*], or [rows,*] if it is pooled.
        Reads the states in `past` and writes those in `present`.

        Raises:
            GraphError: the graph failed.
        """

    def step(self, caches: "BufferedCaches", feeds: Feeds, rows: int) -> Step:
        """Prepare repeated steps, as Caches.step does."""


@dataclass(frozen=True)
class BufferedCaches:
    """Caches of one session (runtime.session.state.Caches).

    A state written in place has one buffer. Any other state has two, for the values before and
    after a call, which are exchanged after each call. Buffers of growing states are
    one-dimensional, because the shape of such a state changes at each call.

    Args:
        graph: the graph that reads and writes the states.
        rows: number of rows R that the buffers hold. With growing states, all of them are in use.
        capacity: slots M of in-place states that the graph is given.
        extent: slots of in-place states that are allocated, at least `capacity`.
        columns: slots of growing states that are in use.
        room: slots of growing states that are allocated.
        past, present: one buffer for each state of the manifest.
    """

    graph: Graph
    rows: int
    capacity: int
    extent: int
    columns: int
    room: int
    past: Tuple[Buffer, ...]
    present: Tuple[Buffer, ...]

    @classmethod
    def open(cls, graph: Graph, rows: int, capacity: int) -> "BufferedCaches":
        """Allocate empty caches."""
        return cls(graph, rows, capacity, capacity, 0, GROWTH, (), ())._with_empty_buffers()

    def run(self, calls: Sequence[Call]) -> Tuple[List[Tuple[int, np.ndarray]], "BufferedCaches"]:
        new = max(call.new for call in calls)
        caches = self.with_columns(self.columns + new)
        outputs: List[Tuple[int, np.ndarray]] = []
        for call in calls:
            outputs += enumerate(self.graph.run(caches, call), call.first)
        covered = {row for call in calls for row in range(call.first, call.first + call.rows)}
        return outputs, caches.after(new, [row for row in range(self.rows) if row not in covered])

    def step(self, feeds: Feeds, rows: int) -> Step:
        return self.graph.step(self, feeds, rows)

    def reserve(self, slots: int, rows: int) -> "BufferedCaches":
        bucket = max(self.graph.manifest.capacity_bucket, 1)
        # At most max_positions slots: keys that are rotated when they are read use a table of that
        # size.
        capacity = min(-(-slots // bucket) * bucket, max(slots, self.graph.manifest.max_positions))
        extent = max(capacity, self.extent)
        if not self.graph.strided:
            capacity = extent
        elif extent > self.extent:  # doubled, so that each token is moved about once
            extent = max(extent, min(2 * self.extent, self.graph.manifest.max_positions))
        room = max(rows, 2 * self.rows) if rows > self.rows else self.rows
        resized = dataclasses.replace(self, rows=room, capacity=capacity, extent=extent)
        if (room, extent) == (self.rows, self.extent):
            return resized
        return resized._moved(lambda state: state.update == "in_place" or room > self.rows, slots)

    def touch(self) -> None:
        for buffer in (*self.past, *self.present):
            buffer.touch()

    def cut(self, keep: np.ndarray) -> "BufferedCaches":
        columns = int(np.flatnonzero(keep.any(0)).max(initial=-1)) + 1
        for state, past, present in self._each("append"):
            shape = self._shape(state, self.columns, self.rows)
            content = np.moveaxis(past.read()[: math.prod(shape)].reshape(shape), state.axis, 1)[
                :, :columns
            ].copy()
            content[~keep[:, :columns]] = state.fill
            flat = np.zeros(present.shape, present.dtype)
            flat[: content.size] = np.moveaxis(content, 1, state.axis).reshape(-1)
            present.write(flat)
        return self._swapped(("append",), columns)

    def wipe(self, hidden: Sequence[Slots]) -> None:
        # A run that was interrupted counts as more slots, which a full cache does not have. Slices
        # end there anyway.
        within = [
            slots if isinstance(slots, slice) else slots[slots < self.extent] for slots in hidden
        ]
        filled = [
            (row, slots)
            for row, slots in enumerate(within)
            if (slots.stop > slots.start if isinstance(slots, slice) else slots.size)
        ]
        for state, past, _ in self._each("in_place"):
            for row, slots in filled if state.reads_hidden else ():
                past.clear_slots(row, state.axis, slots)

    def copy(
        self,
        row: int,
        source: "BufferedCaches",
        first: int,
        slots: int,
        begin: int = 0,
        at: int = 0,
    ) -> None:
        for (state, past, _), (_, given, _) in zip(
            self._each("in_place"), source._each("in_place"), strict=True
        ):
            past.copy_slots(row, given, first, 1, state.axis, slots, begin, at)

    def snapshot(self, row: int) -> List[np.ndarray]:
        return [past.read()[row].copy() for _, past, _ in self._each("replace")]

    def restored(self, states: Dict[int, Sequence[np.ndarray]]) -> "BufferedCaches":
        for index, (state, past, present) in enumerate(self._each("replace")):
            content = past.read().copy()
            for row, values in states.items():
                content[row] = values[index] if len(values) else state.fill
            present.write(content)
        return self._swapped(("replace",), self.columns)

    def emptied(self) -> "BufferedCaches":
        empty = dataclasses.replace(self.restored({row: () for row in range(self.rows)}), columns=0)
        bucket = self.graph.manifest.capacity_bucket
        if self.graph.strided or not 0 < bucket < self.extent:
            return empty
        # The cost of such a graph follows its capacity, which would otherwise stay that of the
        # longest text.
        return dataclasses.replace(empty, capacity=bucket, extent=bucket)._with_empty_buffers()

    def fork(self, rows: int, slots: int) -> "BufferedCaches":
        other = self._with_empty_buffers()
        for state, source, copy in zip(
            self.graph.manifest.states, self.past, other.past, strict=True
        ):
            if state.update == "in_place":
                copy.copy_slots(0, source, 0, rows, state.axis, slots)
            else:
                copy.copy_rows(0, source, 0, source.shape[0])
        return other

    def contents(self, rows: int, slots: int) -> List[np.ndarray]:
        return [
            buffer.read()[self._index(state, rows, slots)]
            for state, buffer in zip(self.graph.manifest.states, self.past, strict=True)
        ]

    def filled(self, contents: Sequence[np.ndarray], rows: int, slots: int) -> "BufferedCaches":
        caches = self.with_columns(slots)
        for state, buffer, content in zip(
            self.graph.manifest.states, caches.past, contents, strict=True
        ):
            whole = buffer.read()
            whole[caches._index(state, rows, slots)] = content
            buffer.write(whole)
        return dataclasses.replace(caches, columns=slots)

    def _index(self, state: State, rows: int, slots: int) -> Tuple[slice, ...]:
        """Return the part of a buffer that holds the first slots of some rows; of a growing
        state, all rows.
        """
        if state.update == "append":
            return (slice(math.prod(self._shape(state, slots, self.rows))),)
        within = (
            (*(slice(None),) * (state.axis - 1), slice(slots)) if state.update == "in_place" else ()
        )
        return (slice(rows), *within)

    def after(self, new: int, idle: Sequence[int]) -> "BufferedCaches":
        """Return the caches after a call of `new` columns. `idle` rows were not part of it and
        keep their states.
        """
        for _, past, present in self._each("replace"):
            for row in idle:
                present.copy_rows(row, past, row, 1)
        return self._swapped(("replace", "append"), self.columns + new)

    def _swapped(self, updates: Sequence[str], columns: int) -> "BufferedCaches":
        """Return the caches with `past` and `present` exchanged for states with these update
        rules.
        """
        pairs = [
            (b, a) if state.update in updates else (a, b)
            for state, a, b in zip(self.graph.manifest.states, self.past, self.present, strict=True)
        ]
        return dataclasses.replace(
            self,
            columns=columns,
            past=tuple(a for a, _ in pairs),
            present=tuple(b for _, b in pairs),
        )

    def _each(self, update: str) -> Iterator[Tuple[State, Buffer, Buffer]]:
        """Yield the states with an update rule, and their buffers before and after a call."""
        return (
            (state, past, present)
            for state, past, present in zip(
                self.graph.manifest.states, self.past, self.present, strict=True
            )
            if state.update == update
        )

    def with_columns(self, columns: int) -> "BufferedCaches":
        """Return caches with room for `columns` slots of growing states."""
        if columns <= self.room:
            return self
        larger = dataclasses.replace(self, room=max(2 * self.room, -(-columns // GROWTH) * GROWTH))
        return larger._moved(lambda state: state.update == "append", 0)

    def _with_empty_buffers(self) -> "BufferedCaches":
        states = self.graph.manifest.states
        past = tuple(self._buffer(state) for state in states)
        present = tuple(
            buffer if state.update == "in_place" else self._buffer(state)
            for state, buffer in zip(states, past, strict=True)
        )
        return dataclasses.replace(self, past=past, present=present)

    def _moved(self, chosen: Callable[[State], bool], slots: int) -> "BufferedCaches":
        """Allocate new buffers for the chosen states and copy the old content; of in-place
        states, only the first `slots` slots.
        """
        past, present = [], []
        for state, old, following in zip(
            self.graph.manifest.states, self.past, self.present, strict=True
        ):
            buffer = self._enlarged(state, old, slots) if chosen(state) else old
            past.append(buffer)
            present.append(
                buffer
                if state.update == "in_place"
                else self._buffer(state)
                if chosen(state)
                else following
            )
        return dataclasses.replace(self, past=tuple(past), present=tuple(present))

    def _enlarged(self, state: State, old: Buffer, slots: int) -> Buffer:
        buffer = self._buffer(state)
        if (
            state.update == "in_place"
        ):  # later slots are not read, and pages that are never written cost no memory
            buffer.copy_slots(
                0, old, 0, old.shape[0], state.axis, min(slots, old.shape[state.axis])
            )
        else:
            buffer.copy_rows(0, old, 0, old.shape[0])
        return buffer

    def _buffer(self, state: State) -> Buffer:
        shape: List[int] = self._shape(
            state, self.room if state.update == "append" else self.extent, self.rows
        )
        # Positions are always on the host, because they are small and a rewind writes them.
        device = "cpu" if state.past == "past_positions" else self.graph.device
        return Buffer(
            [math.prod(shape)] if state.update == "append" else shape,
            state.dtype,
            state.fill,
            device,
        )

    def shapes(self, state: State, rows: int, new: int) -> Tuple[List[int], List[int]]:
        """Return the shapes of a state that the graph is given, before and after a call of
        `rows` rows and `new` columns.
        """
        before, after = (
            (self.columns, self.columns + new)
            if state.update == "append"
            else (self.capacity, self.capacity)
        )
        axes = state.axes[1:]
        return [rows, *(before if isinstance(axis, str) else axis for axis in axes)], [
            rows,
            *(after if isinstance(axis, str) else axis for axis in axes),
        ]

    def _shape(self, state: State, slots: int, rows: int) -> List[int]:
        return [rows, *(slots if isinstance(axis, str) else axis for axis in state.axes[1:])]
