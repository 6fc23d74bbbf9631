"""The memory of all states of a session, and which part of it each run of the graph uses.

Layers that read only the last tokens of a row, a window, keep no others in their caches: slot s
holds token `first_kept` + s of its row. Before a call whose tokens have no room behind them, the
last tokens move to the first slots.

Shapes: R rows in memory, S new tokens, M slots of caches that are written in place.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, State
from posenc_export.runtime.session.graph import (
    Buffer,
    Graph,
    Rules,
    RunMemory,
    Slots,
    StateMemory,
    is_lazy,
    part_of,
    shape_of,
)

FIRST = 256  # slots of the first caches of a graph whose cost does not follow the capacity
MOST_MEMORIES = 64  # ranges of rows whose memory is kept bound
GROWTH = 256  # slots added at a time to buffers of growing states


NEW = 256  # tokens of a call that caches of windows have room for, at least
Slotted = Sequence[Tuple[int, Buffer]]  # the axis of slots and the memory of some caches


class Window(NamedTuple):
    """What caches of windows hold beside new tokens."""

    size: int = 0  # last tokens that a query reads, with its own; 0 if all caches hold all tokens
    behind: int = 0  # tokens that can be taken back
    new: int = 0  # most tokens of a row in a call

    @classmethod
    def of(cls, manifest: Manifest, provider: str, rewind: int) -> "Window":
        """Return the window of a graph. Caches are shorter where that was measured: on the CPU."""
        size = max([state.window for state in manifest.states], default=0)
        if not size or provider != "cpu":
            return cls()
        new = max(NEW, manifest.chunk)
        # States that each call replaces are restored to before a call, and its tokens read again.
        replayed = new if any([state.replaced for state in manifest.states]) else 0
        return cls(size, rewind + replayed, new)

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return self.size - 1 + self.behind + self.new

    def first_kept(self, length: int) -> int:
        """Return the first token that a row of some tokens must keep."""
        return max(length - (self.size - 1) - self.behind, 0) if self.size else 0


class Move(NamedTuple):
    """Tokens of a row on their way to other slots."""

    row: int
    first_kept: int  # token of the row in slot 0 of caches of windows afterwards
    slots: Sequence[int]  # slot of the first of them, by cache
    content: List[np.ndarray]  # of each cache


@dataclass
class Windows:
    """What the memory of caches of windows holds."""

    # Token of each row in slot 0 [R] int64
    first_kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    pending: Optional[Move] = None  # to slot 0, not complete

    def slide(self, window: Window, caches: Slotted, row: int, length: int, count: int) -> None:
        """Let the caches have room for `count` tokens behind the `length` ones of a row: if there
        is none, the tokens that the next ones read move to the first slots, and earlier ones are
        lost.
        """
        old = new = int(self.first_kept[row])
        if length + count - old > window.slots or not length:
            new = window.first_kept(length)
        if new != old:
            kept = slice(new - old, length - old)
            places = [(part_of(row, axis, kept), buffer) for axis, buffer in caches if length]
            content = [buffer.array[place].copy() for place, buffer in places]
            self.pending = Move(row, new, [0] * len(content), content)
            self.settle(caches)

    def settle(self, caches: Slotted) -> None:
        """Complete a move and clear the slots behind it. An interrupted call can be repeated."""
        if self.pending is not None:
            row, first_kept, _, content = self.pending
            write_moves(caches, [self.pending])
            for (axis, buffer), moved in zip(caches, content, strict=False):
                buffer.clear_slots(row, axis, slice(moved.shape[axis - 1], None))
            self.first_kept[row], self.pending = first_kept, None

    def resized(self, rows: int) -> "Windows":
        """Return a copy for another number of rows."""
        first_kept = np.zeros(rows, np.int64)
        first_kept[: len(self.first_kept)] = self.first_kept[:rows]
        return Windows(first_kept)


def write_moves(caches: Slotted, moves: Iterable[Move]) -> None:
    """Write tokens to their slots. An interrupted call can be repeated."""
    for row, _, first_slots, content in moves:
        for (axis, buffer), slot, moved in zip(caches, first_slots, content, strict=False):
            slots = slice(slot, slot + moved.shape[axis - 1])
            buffer.array[part_of(row, axis, slots)] = moved


@dataclass
class BufferNotes:
    """What is known of the content of buffers, and what binds them."""

    # Slots of each row that may have been written in place and not filled or released since [R]
    written: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    windows: Windows = field(default_factory=Windows)
    bindings: Dict[object, Any] = field(default_factory=dict)  # of steps (stepper.py)
    memories: Dict[object, RunMemory] = field(default_factory=dict)  # of runs, in place


@dataclass(eq=False)
class Caches:
    """The states of a batch of rows, as a value: methods that return caches leave this value
    unchanged, except for in-place slots past the valid ones.

    A state written in place has one buffer. Any other state has two, for the values before and
    after a call, which are exchanged after each call. Buffers of growing states are
    one-dimensional, because the shape of such a state changes at each call.

    Args:
        past, present: one buffer for each state of the manifest; none in caches of no rows.
    """

    graph: Graph  # the graph that reads and writes the states
    capacity: int  # largest number of slots of in-place states, as far as calls need no more
    fewest_rows: int  # rows that the first memory holds at least
    rules: Rules  # the states by their update rule
    window: Window = Window()  # what caches of windows hold, if these are shorter than others
    # Whether states have all their slots from the beginning, of which those take memory that are
    # written, so that rows grow without a move. The cost of the graph must not follow the slots.
    lazy: bool = False
    # Number of rows R that the buffers hold. With growing states, all of them are in use.
    rows: int = 0
    graph_slots: int = 0  # slots M of in-place states that the graph is given
    extent: int = 0  # slots of in-place states that are allocated, at least `graph_slots`
    growing_slots: int = 0  # slots of growing states that are in use
    growing_extent: int = 0  # slots of growing states that are allocated
    past: Tuple[Buffer, ...] = ()
    present: Tuple[Buffer, ...] = ()
    # What all values share that have these buffers
    notes: BufferNotes = field(default_factory=BufferNotes)

    @classmethod
    def of(cls, graph: Graph, capacity: int, fewest_rows: int = 1, rewind: int = 1) -> "Caches":
        """Return caches of a graph without memory. rewind: as for Model.session."""
        rules = Rules.of(graph.manifest.states)
        window = Window.of(graph.manifest, graph.provider, rewind) if rules.windowed else Window()
        return cls(graph, capacity, fewest_rows, rules, window, capacity > FIRST and is_lazy(graph))

    def replace(self, **changes: Any) -> "Caches":
        """Return a copy with some fields changed."""
        caches = object.__new__(Caches)
        caches.__dict__.update(self.__dict__, **changes)
        return caches

    @property
    def states(self) -> List[State]:
        """The states of the graph."""
        return self.graph.manifest.states

    def state_memory(self, first: int, rows: int, new: int) -> RunMemory:
        """Return the memory for a run of `new` columns on `rows` rows from row `first` on. It is
        the same for each run if all states are written in place.
        """
        key, kept = (first, rows, self.graph_slots), self.rules.all_in_place
        if kept and key in self.notes.memories:
            return self.notes.memories[key]
        memory, part = RunMemory(), slice(first, first + rows)
        buffers = zip(self.graph.manifest.states, self.past, self.present, strict=True)
        for index, (state, past, present) in enumerate(buffers):
            before = after = (rows, *past.shape[1:])
            offset = first * past.row_bytes
            if index in self.rules.growing:
                before, offset = shape_of(state, rows, self.growing_slots), 0
                after = shape_of(state, rows, self.growing_slots + new)
            elif self.graph_slots < self.extent and index in self.rules.in_place:
                before = after = self.shape(state, rows, self.graph_slots)
            addresses = (past.address + offset, present.address + offset)
            memory.append(StateMemory(state, past, present, part, before, after, addresses))
        if kept:
            if len(self.notes.memories) >= MOST_MEMORIES:
                self.notes.memories.clear()
            self.notes.memories[key] = memory
        return memory

    def reserve(self, slots: int, rows: int) -> "Caches":
        """Return caches with room for `rows` rows of `slots` slots. No slot past `slots` may
        hold a token. More rows get the slots that these need.
        """
        # Calls cost more than their work: after a run of the graph, code is not in the CPU cache.
        alike = self.graph_slots == self.extent and not self.graph.strided
        if alike and rows <= self.rows and slots <= min(self.extent, self.growing_extent):
            return self
        count, fitting = self.rows, self.fitting(slots)
        extent = max(self.extent, fitting)
        if rows > count:
            count = 1 << (rows - 1).bit_length() if count else rows
            extent = fitting
        elif fitting > self.extent and 4 * rows <= count:
            count = rows
        bucket = max(self.graph.manifest.capacity_bucket, 1)
        graph_slots = min(-(-slots // bucket) * bucket, extent) if self.graph.strided else extent
        growing = self.growing_extent
        if slots > growing:
            growing = max(2 * growing, -(-slots // GROWTH) * GROWTH)
        if (count, extent, growing) != (self.rows, self.extent, self.growing_extent):
            try:
                return self._resized(slots, count, graph_slots, extent, growing)
            except MemoryError:
                if not self.lazy:
                    raise
                return self.replace(lazy=False).reserve(slots, rows)
        if graph_slots == self.graph_slots:
            return self
        return self.replace(graph_slots=graph_slots)

    def mark_written(self, rows: slice, slots: Union[int, np.ndarray]) -> None:
        """Count the first slots of some rows, one number or [n], as written."""
        written = self.notes.written[rows]
        np.maximum(written, slots, out=written)

    def after(self, new: int, idle: Iterable[int] = ()) -> "Caches":
        """Return the caches after a run of `new` columns; `idle` rows were not part of it."""
        for index in self.rules.replaced if idle else ():
            for row in idle:
                self.present[index].copy_rows(row, self.past[index], row, 1)
        if self.rules.all_in_place:
            return self
        return self._swapped(self.rules.replaced + self.rules.growing, self.growing_slots + new)

    def cut(self, keep: np.ndarray) -> "Caches":
        """Return caches whose growing states end at the last kept column of keep [B,columns]."""
        columns = int(np.flatnonzero(keep.any(0)).max(initial=-1)) + 1
        for state, past, present in self._buffers(self.rules.growing):
            shape = shape_of(state, self.rows, self.growing_slots)
            content = past.read()[: math.prod(shape)].reshape(shape)
            content = np.moveaxis(content, state.axis, 1)[:, :columns].copy()  # [R,T,*]
            content[~keep[:, :columns]] = state.fill
            flat = np.zeros(present.shape, present.dtype)
            flat[: content.size] = np.moveaxis(content, 1, state.axis).reshape(-1)
            present.write(flat)
        return self._swapped(self.rules.growing, columns)

    def wipe(self, hidden: Sequence[Slots]) -> None:
        """Write the fill value to the hidden slots of each row, where the graph reads them."""
        for state, past, _ in self._buffers(self.rules.in_place):
            for row, slots in enumerate(hidden) if state.reads_hidden else ():
                # An interrupted run counts as more slots than a full cache has. Slices end there.
                within = slots if isinstance(slots, slice) else slots[slots < self.extent]
                if state.window and isinstance(within, slice):
                    first = int(self.notes.windows.first_kept[row])
                    within = slice(max(within.start - first, 0), max(within.stop - first, 0))
                past.clear_slots(row, state.axis, within)

    def copy(self, to: Tuple[int, int], source: "Caches", at: Tuple[int, int], tokens: int) -> None:
        """Copy `tokens` tokens of in-place states of other caches, from a row and token `at` on, to
        `to` of these; in caches of windows those that both hold. A row that begins there has no
        other tokens in these.
        """
        kept = source.notes.windows.first_kept[at[0]], self.notes.windows.first_kept[to[0]]
        begin, target = at[1] - int(kept[0]), to[1] - int(kept[1])
        gone = min(max(0, -begin, -target), tokens)
        for index in self.rules.in_place:
            place, origin, count, axis = to, at, tokens, self.states[index].axis
            if index in self.rules.windowed:
                place, origin, count = (to[0], target + gone), (at[0], begin + gone), tokens - gone
                self.past[index].clear_slots(to[0], axis, slice(0 if to[1] else None))
            self.past[index].copy_slots(place, source.past[index], origin, axis, count)

    def slide(self, first: int, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Let caches of windows have room for counts [n] more tokens of rows from `first` on, and
        for the padding that graphs write that read hidden slots.
        """
        if any(self.states[index].reads_hidden for index in self.rules.windowed):
            counts = np.full_like(counts, counts.max())
        pairs = zip(lengths.tolist(), counts.tolist(), strict=True)
        for row, (length, count) in enumerate(pairs, first):
            self.notes.windows.slide(self.window, self._windowed, row, length, count)

    def settle(self) -> None:
        """Complete a move in caches of windows that was interrupted."""
        self.notes.windows.settle(self._windowed)

    def reach(self, rows: int) -> np.ndarray:
        """Return the least length [rows] above 0 that each row can be rewound to."""
        first_kept = self.notes.windows.first_kept[:rows]
        return np.where(first_kept > 0, first_kept + self.window.size - 1, 0)

    def snapshot(self, row: int) -> List[np.ndarray]:
        """Return copies of one row of the states that each call replaces."""
        return [self.past[index].read()[row].copy() for index in self.rules.replaced]

    def restored(self, states: Dict[int, Sequence[np.ndarray]]) -> "Caches":
        """Return caches with these rows of the replaced states; an empty one is reset."""
        for index, (state, past, present) in enumerate(self._buffers(self.rules.replaced)):
            content = past.read().copy()
            for row, values in states.items():
                content[row] = values[index] if len(values) else state.fill
            present.write(content)
        return self._swapped(self.rules.replaced, self.growing_slots)

    def emptied(self) -> "Caches":
        """Return caches in their initial state. In-place slots may keep their content. Memory that
        has grown is left, unless the graph reads only a part of it.
        """
        grown = self.notes.written.max(initial=0) if self.lazy else self.extent
        if grown > (FIRST if self.lazy else self.fitting(1)) and not self.graph.strided:
            return self.empty()
        if not self.rules.replaced:
            return self if not self.growing_slots else self.replace(growing_slots=0)
        states: Dict[int, Sequence[np.ndarray]] = {row: () for row in range(self.rows)}
        return self.restored(states).replace(growing_slots=0)

    def empty(self) -> "Caches":
        """Return caches of no rows, without memory."""
        return Caches(
            self.graph, self.capacity, self.fewest_rows, self.rules, self.window, self.lazy
        )

    def fork(self, slots: int) -> "Caches":
        """Return a copy in separate memory, with `slots` in-place slots."""
        sizes = (self.rows, self.graph_slots, self.extent, self.growing_extent)
        return self._resized(slots, *sizes, reuse=False) if self.rows else self.empty()

    def _swapped(self, states: Iterable[int], growing: int) -> "Caches":
        past, present = list(self.past), list(self.present)
        for index in states if past else ():
            past[index], present[index] = present[index], past[index]
        return self.replace(growing_slots=growing, past=tuple(past), present=tuple(present))

    @property
    def _windowed(self) -> List[Tuple[int, Buffer]]:
        """The axis of slots and the memory of each cache of a window."""
        return [(state.axis, past) for state, past, _ in self._buffers(self.rules.windowed)]

    def _buffers(self, states: Iterable[int]) -> List[Tuple[State, Buffer, Buffer]]:
        if not self.past:
            return []
        return [(self.states[index], self.past[index], self.present[index]) for index in states]

    def fitting(self, slots: int) -> int:
        """Slots to allocate: doubled, to move tokens rarely, unless the graph then costs more."""
        bucket = self.graph.manifest.capacity_bucket
        if self.lazy:  # padding of shorter rows may follow the longest
            return max(slots, self.capacity + self.graph.manifest.chunk)
        count = -(-slots // (bucket or FIRST))
        if self.graph.strided or not bucket:
            count = 1 << max(count - 1, 0).bit_length()
        return min(count * (bucket or FIRST), max(slots, self.capacity))

    def shape(self, state: State, rows: int, slots: int) -> Tuple[int, ...]:
        """Return the shape of a state with that many slots, unless its window needs fewer."""
        shorter = state.window and self.window.size
        return shape_of(state, rows, min(slots, self.window.slots) if shorter else slots)

    def _resized(
        self, slots: int, rows: int, graph_slots: int, extent: int, growing: int, reuse: bool = True
    ) -> "Caches":
        """Return caches of other sizes with the same content, of in-place states `slots` slots.
        reuse: whether they share buffers whose sizes stay the same.
        """
        past, present = [], []
        for index, state in enumerate(self.graph.manifest.states):
            grows, in_place = index in self.rules.growing, index in self.rules.in_place
            of = self.shape if state.window else shape_of
            shape = of(state, rows, growing if grows else extent)
            shape = (math.prod(shape),) if grows else shape
            old = self.past[index] if self.past else None
            if reuse and old is not None and old.shape == shape:
                past.append(old)
                present.append(self.present[index])
                continue
            # Positions are always on the host, because they are small and a rewind writes them.
            device = "cpu" if state.holds_positions else self.graph.device
            lazy = self.lazy and in_place and not (state.window and self.window.size)
            buffer = Buffer(shape, state.dtype, state.fill, device, lazy)
            if old is not None:
                count = min(old.shape[0], shape[0])
                filled = self.notes.written[:count].tolist() if in_place else ()
                for row, written in enumerate(filled):
                    kept = min(slots, written, old.shape[state.axis])
                    buffer.copy_slots((row, 0), old, (row, 0), state.axis, kept)
                if not in_place:
                    buffer.copy_rows(0, old, 0, count)
            past.append(buffer)
            present.append(buffer if in_place else Buffer(shape, state.dtype, state.fill, device))
        windows, windowed = self.notes.windows, self.rules.windowed
        reused = self.past and (not windowed or past[windowed[0]] is self.past[windowed[0]])
        if rows != self.rows or not (reuse and reused):
            windows = windows.resized(rows)
        written = np.zeros(rows, np.int64)
        written[: self.rows] = np.minimum(self.notes.written[:rows], slots)
        return self.replace(
            rows=rows,
            graph_slots=graph_slots,
            extent=extent,
            growing_extent=growing,
            past=tuple(past),
            present=tuple(present),
            notes=BufferNotes(written, windows),
        )
