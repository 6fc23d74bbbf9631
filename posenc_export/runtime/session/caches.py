"""Caches of a session: the memory of all states, which part of it each run of the graph reads and
writes, and the bindings of that memory to the graph.

Shapes: R rows in memory, S new tokens, M slots of caches that are written in place.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Callable, Dict, FrozenSet, Iterator, List, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import State
from posenc_export.runtime.session.binding import Binding, Memory
from posenc_export.runtime.session.buffer import Buffer, Slots
from posenc_export.runtime.session.graph import Bound, Graph, shape_of

FIRST = 256  # slots of the first caches of a graph whose cost does not follow the capacity
GROWTH = 256  # slots added at a time to buffers of growing states
MOST_BINDINGS = 64


@dataclass(frozen=True)
class Caches:
    """The states of a batch of rows, as a value: methods that return caches leave this value
    unchanged, except for in-place slots past the valid ones.

    A state written in place has one buffer. Any other state has two, for the values before and
    after a call, which are exchanged after each call. Buffers of growing states are
    one-dimensional, because the shape of such a state changes at each call.

    Args:
        graph: the graph that reads and writes the states.
        most: largest number of slots of in-place states, as far as calls need no more.
        fewest: rows that the first memory holds at least.
        updates: update rules of the states.
        rows: number of rows R that the buffers hold. With growing states, all of them are in use.
        capacity: slots M of in-place states that the graph is given.
        extent: slots of in-place states that are allocated, at least `capacity`.
        columns: slots of growing states that are in use.
        room: slots of growing states that are allocated.
        past, present: one buffer for each state of the manifest; none in caches of no rows.
        memory: what all values share that have these buffers.
    """

    graph: Graph
    most: int
    fewest: int
    updates: FrozenSet[str]
    rows: int = 0
    capacity: int = 0
    extent: int = 0
    columns: int = 0
    room: int = 0
    past: Tuple[Buffer, ...] = ()
    present: Tuple[Buffer, ...] = ()
    memory: Memory = field(default_factory=Memory)

    @classmethod
    def of(cls, graph: Graph, most: int, fewest: int = 1) -> "Caches":
        """Return caches of a graph without memory."""
        updates = frozenset([state.update for state in graph.manifest.states])
        return cls(graph, most, fewest, updates)

    @property
    def states(self) -> List[State]:
        """The states of the graph."""
        return self.graph.manifest.states

    def bound(self, first: int, rows: int, new: int) -> List[Bound]:
        """Return the memory for a run of `new` columns on `rows` rows from row `first` on."""
        states = []
        part, plain = slice(first, first + rows), self.updates == {"in_place"}
        for state, past, present in zip(self.states, self.past, self.present, strict=True):
            before = after = (rows, *past.shape[1:])
            offset = first * past.row_bytes
            if not plain and state.grows:
                before, offset = shape_of(state, rows, self.columns), 0
                after = shape_of(state, rows, self.columns + new)
            elif self.capacity < self.extent and (plain or state.in_place):
                before = after = shape_of(state, rows, self.capacity)
            addresses = (past.address + offset, present.address + offset)
            states.append(Bound(state, past, present, part, before, after, addresses))
        return states

    def binding(self, key: object, make: Callable[[], Binding]) -> Binding:
        """Return the binding of this memory with a key, made on first use."""
        bindings = self.memory.bindings
        if key not in bindings:
            if len(bindings) >= MOST_BINDINGS:
                bindings.clear()
            bindings[key] = make()
        return bindings[key]

    def reserve(self, slots: int, rows: int) -> "Caches":
        """Return caches with room for `rows` rows of `slots` slots. No slot past `slots` may
        hold a token. More rows get the slots that these need.
        """
        count, fitting = self.rows, self._extent(slots)
        extent = max(self.extent, fitting)
        if rows > count:
            count = 1 << (rows - 1).bit_length() if count else rows
            extent = fitting
        elif fitting > self.extent and 4 * rows <= count:
            count = rows
        bucket = max(self.graph.manifest.capacity_bucket, 1)
        capacity = min(-(-slots // bucket) * bucket, extent) if self.graph.strided else extent
        room = self.room
        if slots > room:
            room = max(2 * room, -(-slots // GROWTH) * GROWTH)
        if (count, extent, room) != (self.rows, self.extent, self.room):
            return self._resized(slots, count, capacity, extent, room)
        return self if capacity == self.capacity else dataclasses.replace(self, capacity=capacity)

    def peak(self, rows: int, slots: int) -> int:
        """Return the most bytes that these caches take while they grow to `rows` rows of `slots`
        slots, where buffers are moved to larger ones.
        """
        count, extent = 1 << (rows - 1).bit_length(), self._extent(slots)
        allocated = self.allocated
        if rows <= self.rows and extent <= self.extent:
            return allocated
        needed = sum(
            math.prod(shape_of(state, count, extent)) * Buffer.element_bytes(state.dtype)
            for state in self.states
        )
        return needed + max(allocated, needed // 2)

    @property
    def allocated(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.bytes for buffer in {*self.past, *self.present})

    def after(self, new: int, idle: Sequence[int] = ()) -> "Caches":
        """Return the caches after a run of `new` columns. `idle` rows were not part of it and
        keep their states.
        """
        for _, past, present in self._each("replace") if idle else ():
            for row in idle:
                present.copy_rows(row, past, row, 1)
        return self._swapped(("replace", "append"), self.columns + new)

    def cut(self, keep: np.ndarray) -> "Caches":
        """Return caches whose growing states end at the last kept column and hold their fill
        value where keep [B,columns] is False.
        """
        columns = int(np.flatnonzero(keep.any(0)).max(initial=-1)) + 1
        for state, past, present in self._each("append"):
            shape = shape_of(state, self.rows, self.columns)
            content = np.moveaxis(past.read()[: math.prod(shape)].reshape(shape), state.axis, 1)[
                :, :columns
            ].copy()  # [R,T,*]
            content[~keep[:, :columns]] = state.fill
            flat = np.zeros(present.shape, present.dtype)
            flat[: content.size] = np.moveaxis(content, 1, state.axis).reshape(-1)
            present.write(flat)
        return self._swapped(("append",), columns)

    def wipe(self, hidden: Sequence[Slots]) -> None:
        """Write the fill value to the hidden slots of each row, in the in-place states whose
        hidden slots the graph reads.
        """
        for state, past, _ in self._each("in_place"):
            for row, slots in enumerate(hidden) if state.reads_hidden else ():
                # An interrupted run counts as more slots than a full cache has. Slices end there.
                within = slots if isinstance(slots, slice) else slots[slots < self.extent]
                past.clear_slots(row, state.axis, within)

    def copy(self, to: Tuple[int, int], source: "Caches", at: Tuple[int, int], slots: int) -> None:
        """Copy `slots` slots of caches of the same graph from a row and slot `at` to a row and slot
        `to` of these, in all in-place states.
        """
        for (state, past, _), (_, other, _) in zip(
            self._each("in_place"), source._each("in_place"), strict=True
        ):
            past.copy_slots(to, other, at, 1, state.axis, slots)

    def snapshot(self, row: int) -> List[np.ndarray]:
        """Return copies of one row of the states that each call replaces."""
        return [past.read()[row].copy() for _, past, _ in self._each("replace")]

    def restored(self, states: Dict[int, Sequence[np.ndarray]]) -> "Caches":
        """Return caches with the given rows of the states that each call replaces; an empty
        sequence resets a row to its initial state.
        """
        for index, (state, past, present) in enumerate(self._each("replace")):
            content = past.read().copy()
            for row, values in states.items():
                content[row] = values[index] if len(values) else state.fill
            present.write(content)
        return self._swapped(("replace",), self.columns)

    def emptied(self) -> "Caches":
        """Return caches in their initial state. In-place slots may keep their content. Memory that
        has grown is left, unless the graph reads only a part of it.
        """
        if self.extent > self._extent(1) and not self.graph.strided:
            return self.empty()
        states: Dict[int, Sequence[np.ndarray]] = {row: () for row in range(self.rows)}
        return dataclasses.replace(self.restored(states), columns=0)

    def empty(self) -> "Caches":
        """Return caches of no rows, without memory."""
        return Caches(self.graph, self.most, self.fewest, self.updates)

    def fork(self, rows: int, slots: int) -> "Caches":
        """Return a copy in separate memory. Of in-place states, the first `slots` slots of the
        first `rows` rows are copied.
        """
        if not self.rows:
            return self.empty()
        blank = dataclasses.replace(self, past=(), present=(), memory=Memory())
        sizes = (self.rows, self.capacity, self.extent, self.room)
        other = blank._resized(0, *sizes)
        for state, source, copy in zip(self.states, self.past, other.past, strict=True):
            if state.in_place:
                copy.copy_slots((0, 0), source, (0, 0), rows, state.axis, slots)
            else:
                copy.copy_rows(0, source, 0, source.shape[0])
        other.memory.written = slots
        return other

    def _swapped(self, updates: Sequence[str], columns: int) -> "Caches":
        """Return the caches with `past` and `present` exchanged for states with these update
        rules.
        """
        if self.past is self.present:
            return dataclasses.replace(self, columns=columns)
        past, present = list(self.past), list(self.present)
        for index, state in enumerate(self.states):
            if state.update in updates:
                past[index], present[index] = present[index], past[index]
        return dataclasses.replace(self, columns=columns, past=tuple(past), present=tuple(present))

    def _each(self, update: str) -> Iterator[Tuple[State, Buffer, Buffer]]:
        """Yield the states with an update rule, and their buffers before and after a call."""
        for state, past, present in zip(self.states, self.past, self.present, strict=False):
            if state.update == update:
                yield state, past, present

    def _extent(self, slots: int) -> int:
        """Return the slots to allocate for `slots`: doubled, so that each token is moved about
        once, unless the cost of the graph follows what is allocated.
        """
        bucket = self.graph.manifest.capacity_bucket
        count = -(-slots // (bucket or FIRST))
        if self.graph.strided or not bucket:
            count = 1 << max(count - 1, 0).bit_length()
        return min(count * (bucket or FIRST), max(slots, self.most))

    def _resized(self, slots: int, rows: int, capacity: int, extent: int, room: int) -> "Caches":
        """Return caches of other sizes with the same content; of in-place states, the first `slots`
        slots.
        """
        past, present = [], []
        for index, state in enumerate(self.states):
            grows = state.grows
            shape = shape_of(state, rows, room if grows else extent)
            shape = (math.prod(shape),) if grows else shape
            old = self.past[index] if self.past else None
            if old is not None and old.shape == shape:
                past.append(old)
                present.append(self.present[index])
                continue
            # Positions are always on the host, because they are small and a rewind writes them.
            device = "cpu" if state.holds_positions else self.graph.device
            buffer = Buffer(shape, state.dtype, state.fill, device)
            if old is not None:
                count = min(old.shape[0], shape[0])
                if state.in_place:
                    kept = min(slots, old.shape[state.axis])
                    buffer.copy_slots((0, 0), old, (0, 0), count, state.axis, kept)
                else:
                    buffer.copy_rows(0, old, 0, count)
            past.append(buffer)
            if not state.in_place:
                buffer = Buffer(shape, state.dtype, state.fill, device)
            present.append(buffer)
        written = tuple(past)
        return dataclasses.replace(
            self,
            rows=rows,
            capacity=capacity,
            extent=extent,
            room=room,
            past=written,
            present=written if self.updates <= {"in_place"} else tuple(present),
            memory=Memory(min(self.memory.written, slots)),
        )
