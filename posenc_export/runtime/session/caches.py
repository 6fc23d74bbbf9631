"""The memory of all states of a session, and which part of it each run of the graph uses.

Layers that read only the last tokens of a row, a window, keep no others in their caches: slot s
holds token `first kept` + s of its row. Before a call whose tokens have no room behind them, the
last tokens move to the first slots.

Shapes: R rows in memory, S new tokens, M slots of caches that are written in place.
"""

import math
from functools import partial
from typing import Any, Callable, NamedTuple, Protocol, Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, State
from posenc_export.runtime.session.buffers import CAN_RESERVE, Buffer, Place, Slots

MOST_RUNS = 64  # ranges of rows whose memory is kept
INITIAL_SLOTS = 256  # slots of the first caches of a graph whose cost does not follow the capacity
WINDOW_ROOM = 256  # tokens of a call that caches of windows have room for, at least
Write = Callable[[], None]  # a write to memory that can be repeated after an interrupt
Feeds = dict[str, np.ndarray]  # graph inputs or outputs of a run by name, without the caches
Shape = tuple[int, ...]
BoundRun = Callable[[], object]


class StateMemory(NamedTuple):
    """The memory of a state that one run of the graph reads and writes."""

    state: State
    past: Buffer
    present: Buffer
    first: int  # index of the first row of the run
    before: Shape  # shape that the graph reads
    after: Shape  # shape that the graph writes


class RunMemory(list[StateMemory]):
    """The memory of the states of a run, and what a graph keeps of it for the next one."""

    bound: Any = None


class Graph(Protocol):
    """A loaded graph."""

    manifest: Manifest  # manifest of the artefact
    provider: str  # provider that runs the graph, a name that `load` takes
    device: str  # device of the buffers, "cpu" or "cuda"

    def bind(self, feeds: Feeds, states: RunMemory, outputs: Feeds, once: bool = False) -> BoundRun:
        """Return a function that runs the graph on the current content of `feeds` and `states`, and
        writes outputs to those given by name, [B,S,*], or [B,*] if pooled. It raises RUN_ERRORS if
        the graph fails. once: whether it is called once, before another is bound to `states`.
        """


class Window(NamedTuple):
    """What caches of windows hold beside new tokens."""

    size: int = 0  # last tokens that a query reads, with its own; 0 if all caches hold all tokens
    rewind: int = 0  # tokens that can be taken back
    new: int = 0  # most tokens of a row in a call

    @classmethod
    def of(cls, manifest: Manifest, provider: str, rewind: int) -> "Window":
        """Return the window of a graph; size 0 off the CPU, where all caches hold all tokens."""
        size = max([state.window for state in manifest.states], default=0)
        if not size or provider != "cpu":
            return cls()
        new = max(WINDOW_ROOM, manifest.chunk)
        # States that each call replaces are restored to before a call, and its tokens read again.
        replayed = new if any([state.replaced for state in manifest.states]) else 0
        return cls(size, rewind + replayed, new)

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return self.size - 1 + self.rewind + self.new

    def first_kept(self, length: int) -> int:
        """Return the first token that a row of some tokens must keep."""
        return max(length - (self.size - 1) - self.rewind, 0) if self.size else 0


class Memory(NamedTuple):
    """The memory of a state. A state that is written in place has one buffer, listed twice. For
    others, a run reads one buffer and writes the other. A state that grows fills its first numbers.
    """

    state: State
    buffers: tuple[Buffer, Buffer]

    def take(self, old: "Memory", slots: Sequence[int], turn: int) -> None:
        """Copy the content of other memory, as far as there is room. slots: for a state in place,
        how many first slots of each row to copy.
        """
        here, there = self.buffers[turn], old.buffers[turn]
        if not self.state.in_place:
            here.copy_rows(0, there, 0, min(there.shape[0], here.shape[0]))
            return
        most = min(there.shape[there.axis], here.shape[here.axis])
        for row, count in enumerate(slots):
            here.copy_slots((row, 0), there, (row, 0), min(count, most))

    def cut(self, turn: int, keep: np.ndarray, columns: int) -> Write:
        """Return a write that keeps the first columns of a state that grows, and fills slots where
        `keep` [R,used] is False.
        """
        buffer, axis, (rows, used) = self.buffers[turn], self.state.axis, keep.shape
        shape = shape_of(self.state, rows, used)
        content = buffer.read()[: math.prod(shape)].reshape(shape)
        content = np.moveaxis(content, axis, 1)[:, :columns].copy()  # [R,columns,*]
        content[~keep[:, :columns]] = self.state.fill
        flat = np.moveaxis(content, 1, axis).reshape(-1)
        return partial(buffer.write, (slice(flat.size),), flat)


GROWS, IN_PLACE, REPLACED = "append", "in_place", "replace"  # State.update


class Caches:
    """The memory of the states of a graph. Its sizes are fixed: larger ones are another Caches.

    Args:
        graph, capacity, rewind: as for Session.
        fewest_rows: least number of rows R to allocate.

    Attributes:
        states: the memory of each state; none before memory is reserved.
        grows, replaces: whether calls append to a state, or replace one.
        in_place: whether all states are written in place.
        by_columns: whether all rows advance together.
        reads_hidden: whether the graph reads slots past the tokens of a row.
        rows: number of rows R. Of graphs with growing states, all of them are in use.
        extent: slots that are allocated of states in place and of growing ones.
        written: number of first slots of each row [R] that may have been written.
        lazy: whether rows have as many slots as the capacity from the start, so that they grow
            without a move. Only slots that are written take memory. The cost of the graph must not
            depend on the number of slots.
        bindings: bound graph inputs of few tokens, by their shapes.
    """

    def __init__(self, graph: Graph, capacity: int, fewest_rows: int = 1, rewind: int = 1) -> None:
        states = graph.manifest.states
        self.graph, self.capacity, self.fewest_rows = graph, capacity, fewest_rows
        self.rewind, self.window = rewind, Window.of(graph.manifest, graph.provider, rewind)
        self.by_columns = graph.manifest.by_columns
        self.grows = any([state.grows for state in states])
        self.replaces = any([state.replaced for state in states])
        self.in_place = all([state.in_place for state in states])
        self.reads_hidden = any([state.reads_hidden for state in states])
        self.lazy = capacity > INITIAL_SLOTS and allocates_lazily(graph)
        self._allocate(0, 0)

    def _allocate(self, rows: int, extent: int) -> None:
        self.rows, self.extent = rows, extent
        self.written = np.zeros(rows, np.int64)
        self.states: list[Memory] = []
        self.bindings: dict[Any, Any] = {}
        self._runs: dict[tuple[int, int], RunMemory] = {}

    @property
    def buffers(self) -> list[Buffer]:
        """All memory; each buffer once."""
        return list(dict.fromkeys(buffer for memory in self.states for buffer in memory.buffers))

    def of(self, kind: str) -> list[Memory]:
        """Return the memory of the states with an update rule."""
        return [memory for memory in self.states if memory.state.update == kind]

    def state_memory(self, rows: slice, used: int, new: int, turn: int) -> RunMemory:
        """Return the memory for a run of `new` columns behind `used` ones on some rows. It is the
        same for each run if all states are written in place.
        """
        first, count = rows.start, rows.stop - rows.start
        if run := self._runs.get((first, count)):
            return run
        run = RunMemory()
        for state, buffers in self.states:
            past, present = buffers[turn], buffers[1 - turn]
            before = after = (count, *past.shape[1:])
            if state.update == GROWS:
                before, after = (shape_of(state, count, slots) for slots in (used, used + new))
            run.append(StateMemory(state, past, present, first, before, after))
        if self.in_place:
            if len(self._runs) >= MOST_RUNS:
                self._runs.clear()
            self._runs[first, count] = run
        return run

    def reserve(self, slots: int, rows: int, turn: int = 0) -> "Caches":
        """Return caches with room for `rows` rows of `slots` slots. No slot past `slots` may
        hold a token. More rows get the slots that these need. turn: which of two buffers holds the
        content.
        """
        # Calls cost more than their work: after a run of the graph, code is not in the CPU cache.
        if slots <= self.extent and rows <= self.rows:
            return self
        count, fitting = self.rows, self.fitting(slots)
        extent = max(self.extent, fitting)
        if rows > count:
            count = 1 << (rows - 1).bit_length() if count else rows
            extent = fitting
        elif fitting > self.extent and 4 * rows <= count:
            count = rows
        same = (count, extent) == (self.rows, self.extent)
        return self if same else self._resized(count, extent, slots, turn)

    def mark_written(self, rows: slice, slots: int | np.ndarray) -> None:
        """Count the first slots of some rows, one number or [n], as written."""
        written = self.written[rows]
        np.maximum(written, slots, out=written)

    def clear(self, row: int, hidden: Slots, in_windows: Slots) -> None:
        """Write the fill value to hidden slots of a row where the graph reads them. in_windows:
        those of caches of windows.
        """
        for state, (buffer, _) in self.of(IN_PLACE):
            if state.reads_hidden:
                buffer.clear(row, in_windows if state.window else hidden)

    def copy(
        self, to: Place, source: "Caches", at: Place, tokens: int, kept: tuple[int, int] = (0, 0)
    ) -> None:
        """Copy `tokens` tokens of states in place from other caches, from row and token `at` on, to
        row and token `to` of these. Caches of windows get the tokens that both hold; a row that
        begins at token 0 loses its others. kept: token in slot 0 of caches of windows, of `to`
        first.
        """
        target, begin = to[1] - int(kept[0]), at[1] - int(kept[1])
        gone = min(max(0, -begin, -target), tokens)
        for memory, origin in zip(self.of(IN_PLACE), source.of(IN_PLACE), strict=True):
            (buffer, _), (other, _) = memory.buffers, origin.buffers
            if memory.state.window:
                buffer.clear(to[0], slice(0 if to[1] else None))
                place = (to[0], target + gone), (at[0], begin + gone)
                buffer.copy_slots(place[0], other, place[1], tokens - gone)
            else:
                buffer.copy_slots(to, other, at, tokens)

    def moves(self, row: int, slots: slice) -> list[Write]:
        """Return the writes that move slots of caches of windows of a row to the first slots, and
        clear those behind.
        """

        def move(buffer: Buffer, content: np.ndarray) -> None:
            count = content.shape[buffer.axis - 1]
            buffer.write(buffer.part(row, slice(count)), content)
            buffer.clear(row, slice(count, None))

        windowed = [memory.buffers[0] for memory in self.of(IN_PLACE) if memory.state.window]
        return [partial(move, one, one.read()[one.part(row, slots)].copy()) for one in windowed]

    def snapshot(self, row: int, turn: int) -> list[np.ndarray]:
        """Return copies of one row of the states that each call replaces."""
        return [memory.buffers[turn].read()[row].copy() for memory in self.of(REPLACED)]

    def emptied(self) -> "Caches":
        """Return caches for other rows: these, with old content in their slots, or caches without
        memory if theirs has grown.
        """
        grown = self.written.max(initial=0) if self.lazy else self.extent
        return self.empty() if grown > (INITIAL_SLOTS if self.lazy else self.fitting(1)) else self

    def empty(self, rows: int = 0, extent: int = 0) -> "Caches":
        """Return caches of some size that have no memory yet."""
        caches = object.__new__(Caches)
        caches.__dict__.update(self.__dict__)
        caches._allocate(rows, extent)
        return caches

    def fork(self, slots: int, turn: int) -> "Caches":
        """Return a copy in separate memory, with `slots` slots of states in place."""
        if not self.rows:
            return self.empty()
        return self._resized(self.rows, self.extent, slots, turn, reuse=False)

    def fitting(self, slots: int) -> int:
        """Slots to allocate: doubled, to move tokens rarely, unless the graph then costs more."""
        bucket = self.graph.manifest.capacity_bucket
        if self.lazy:  # padding of shorter rows may follow the longest
            return max(slots, self.capacity + self.graph.manifest.chunk)
        count = -(-slots // (bucket or INITIAL_SLOTS))
        if not bucket:
            count = 1 << max(count - 1, 0).bit_length()
        return min(count * (bucket or INITIAL_SLOTS), max(slots, self.capacity))

    def shape(self, state: State, rows: int, slots: int) -> Shape:
        """Return the shape of a state with that many slots, unless its window needs fewer."""
        shorter = state.window and self.window.size
        return shape_of(state, rows, min(slots, self.window.slots) if shorter else slots)

    def _resized(
        self, rows: int, extent: int, slots: int, turn: int, reuse: bool = True
    ) -> "Caches":
        """Return caches of other sizes with the same content. States in place keep `slots` slots.
        reuse: whether they share buffers whose sizes stay the same.
        """
        caches = self.empty(rows, extent)
        caches.written[: self.rows] = np.minimum(self.written[:rows], slots)
        filled = self.written[:rows].clip(max=slots).tolist()
        shapes: dict[Any, Shape] = {}
        for index, state in enumerate(self.graph.manifest.states):
            key = (state.axes, state.axis, state.window)  # layers have states of few shapes
            if key not in shapes:
                shapes[key] = self.shape(state, rows, extent)
            shape = (math.prod(shapes[key]),) if state.update == GROWS else shapes[key]
            old: Any = self.states[index] if self.states else None
            if reuse and old is not None and old.buffers[0].shape == shape:
                caches.states.append(old)
                continue
            # Positions are always on the host, because they are small and a rewind writes them.
            device = self.graph.device
            device = "cpu" if device != "cpu" and state.holds_positions else device
            in_place = state.update == IN_PLACE
            lazy = self.lazy and in_place and not (state.window and self.window.size)
            buffer = Buffer(shape, state, device, lazy)
            memory = Memory(state, (buffer, buffer if in_place else Buffer(shape, state, device)))
            if old is not None:
                memory.take(old, filled, turn)
            caches.states.append(memory)
        return caches


def shape_of(state: State, rows: int, slots: int) -> Shape:
    """Return the shape of a state of some rows, with this number of slots if it has them."""
    axis = state.axis
    if not axis:
        return (rows, *state.axes[1:])  # type: ignore[arg-type]
    return (rows, *state.axes[1:axis], slots, *state.axes[axis + 1 :])  # type: ignore[arg-type]


def allocates_lazily(graph: Graph) -> bool:
    """Whether caches of a graph may have unused slots, which then take no memory."""
    manifest = graph.manifest
    moves = any([s.grows or (s.in_place and s.reads_hidden) for s in manifest.states])
    return CAN_RESERVE and graph.device == "cpu" and not (moves or manifest.capacity_bucket)
