"""Caches in buffers of a session, which a graph of any runtime reads and writes."""

import dataclasses
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Protocol, Sequence, Tuple

import numpy as np

from posenc_export.runtime.buffer import Buffer
from posenc_export.runtime.committed import Call, Slots, Step
from posenc_export.runtime.feeds import Feeds
from posenc_export.runtime.manifest import Manifest, State

GROWTH = 256  # slots added at a time to buffers of growing caches


class Graph(Protocol):
    """A loaded graph.

    Attributes:
        manifest: its description.
        provider: what runs it, a name that `load` takes.
        device: where its buffers are, "cpu" or "cuda".
        strided: whether it takes the first slots of a buffer as a tensor; elsewhere a buffer has as many slots as the graph is given.
    """

    manifest: Manifest
    provider: str
    device: str
    strided: bool

    def run(self, caches: "BufferedCaches", call: Call, new: int) -> np.ndarray:
        """The output [rows,S,*] of a call of `new` columns, from the states in `past` to those in `present`.

        Raises:
            GraphError: the runtime stopped.
        """

    def step(self, caches: "BufferedCaches", feeds: Feeds, rows: int) -> Step:
        """As Caches.step."""


@dataclass(frozen=True)
class BufferedCaches:
    """The states of the rows of one session (runtime.committed.Caches).

    States written in place have one buffer; the others have two, the last call's and the next one's, which change places. Growing states are flat:
    their shape is another one at each call.

    Args:
        graph: reads and writes them.
        rows: R, rows there is room for; all of them in use where states grow.
        capacity: slots M of states written in place that the graph is given.
        extent: slots M there is memory for, at least capacity.
        columns: slots in use of growing states.
        room: slots there is room for in growing states.
        past, present: a buffer for each state of the manifest.
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
        """Empty caches."""
        return cls(graph, rows, capacity, capacity, 0, GROWTH, (), ())._with_empty_buffers()

    def run(self, calls: Sequence[Call]) -> Tuple[List[Tuple[int, np.ndarray]], "BufferedCaches"]:
        new = int(calls[0].feeds[self.graph.manifest.inputs[0].name].shape[1])
        grown = self.with_columns(self.columns + new)
        outputs: List[Tuple[int, np.ndarray]] = []
        for call in calls:
            outputs += enumerate(self.graph.run(grown, call, new), call.first)
        covered = {row for call in calls for row in range(call.first, call.first + call.rows)}
        return outputs, grown.after(new, [row for row in range(self.rows) if row not in covered])

    def step(self, feeds: Feeds, rows: int) -> Step:
        return self.graph.step(self, feeds, rows)

    def reserve(self, slots: int, rows: int) -> "BufferedCaches":
        bucket = max(self.graph.manifest.capacity_bucket, 1)
        # No more slots than positions: keys turned when they are read take their rows from a table of that size.
        capacity = min(-(-slots // bucket) * bucket, max(slots, self.graph.manifest.max_positions))
        extent = max(capacity, self.extent)
        if not self.graph.strided:
            capacity = extent
        elif extent > self.extent:  # doubled: a token is moved about once in all
            extent = max(extent, min(2 * self.extent, self.graph.manifest.max_positions))
        room = max(rows, 2 * self.rows) if rows > self.rows else self.rows
        resized = dataclasses.replace(self, rows=room, capacity=capacity, extent=extent)
        if (room, extent) == (self.rows, self.extent):
            return resized
        return resized._moved(lambda state: state.update == "in_place" or room > self.rows, slots)

    def cut(self, keep: np.ndarray) -> "BufferedCaches":
        columns = int(np.flatnonzero(keep.any(0)).max(initial=-1)) + 1
        for state, past, present in self._each("append"):
            content = past.read()[: int(np.prod(self.shape(state, self.columns, self.rows)))].reshape(self.shape(state, self.columns, self.rows))
            kept = np.moveaxis(content, state.axis, 1)[:, :columns].copy()
            kept[~keep[:, :columns]] = state.fill
            present.write(_resized(np.ascontiguousarray(np.moveaxis(kept, 1, state.axis)).reshape(-1), present.shape[0]))
        return self._swapped(("append",), columns)

    def wipe(self, hidden: Sequence[Slots]) -> None:
        # A step that broke off counts as one slot more, which a full cache does not have: a slice ends there by itself.
        within = [slots if isinstance(slots, slice) else slots[slots < self.extent] for slots in hidden]
        filled = [(row, slots) for row, slots in enumerate(within) if (slots.stop > slots.start if isinstance(slots, slice) else slots.size)]
        for state, past, _ in self._each("in_place"):
            if state.reads_hidden and filled:
                content = past.read()
                for row, slots in filled:
                    content[(row, *(slice(None),) * (state.axis - 1), slots)] = state.fill
                past.write(content)

    def move(self, source: int, target: int, slots: int) -> None:
        for state, past, _ in self._each("in_place"):
            content, valid = past.read(), (slice(None),) * (state.axis - 1) + (slice(slots),)
            content[(target, *valid)] = content[(source, *valid)]
            past.write(content)

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
        return dataclasses.replace(self.restored({row: () for row in range(self.rows)}), columns=0)

    def fork(self, rows: int, slots: int) -> "BufferedCaches":
        other = self._with_empty_buffers()
        for state, mine, its in zip(self.graph.manifest.states, self.past, other.past, strict=True):
            if state.update == "in_place" and mine.device == "cpu":
                valid = (slice(rows), *(slice(None),) * (state.axis - 1), slice(slots))
                its.array[valid] = mine.array[valid]
            else:
                its.write(mine.read())
        return other

    def after(self, new: int, idle: Sequence[int]) -> "BufferedCaches":
        """The states behind a call of `new` columns; idle rows took no part in it."""
        for _, past, present in self._each("replace"):
            if idle:
                content = present.read()
                content[list(idle)] = past.read()[list(idle)]
                present.write(content)
        return self._swapped(("replace", "append"), self.columns + new)

    def _swapped(self, updates: Sequence[str], columns: int) -> "BufferedCaches":
        """The next call's states of these update rules in the place of the last call's."""
        pairs = [(b, a) if state.update in updates else (a, b) for state, a, b in zip(self.graph.manifest.states, self.past, self.present, strict=True)]
        return dataclasses.replace(self, columns=columns, past=tuple(a for a, _ in pairs), present=tuple(b for _, b in pairs))

    def _each(self, update: str) -> Iterator[Tuple[State, Buffer, Buffer]]:
        """States of one update rule with their buffers, last call's and next one's."""
        return ((state, past, present) for state, past, present in zip(self.graph.manifest.states, self.past, self.present, strict=True) if state.update == update)

    def with_columns(self, columns: int) -> "BufferedCaches":
        if columns <= self.room:
            return self
        larger = dataclasses.replace(self, room=max(2 * self.room, -(-columns // GROWTH) * GROWTH))
        return larger._moved(lambda state: state.update == "append", 0)

    def _with_empty_buffers(self) -> "BufferedCaches":
        states = self.graph.manifest.states
        past = tuple(self._buffer(state) for state in states)
        present = tuple(buffer if state.update == "in_place" else self._buffer(state) for state, buffer in zip(states, past, strict=True))
        return dataclasses.replace(self, past=past, present=present)

    def _moved(self, chosen: Callable[[State], bool], slots: int) -> "BufferedCaches":
        """New buffers of these sizes for the chosen states, with the content of the old ones: of those in place, that of the first `slots` slots."""
        past, present = [], []
        for state, old, following in zip(self.graph.manifest.states, self.past, self.present, strict=True):
            buffer = self._enlarged(state, old, slots) if chosen(state) else old
            past.append(buffer)
            present.append(buffer if state.update == "in_place" else self._buffer(state) if chosen(state) else following)
        return dataclasses.replace(self, past=tuple(past), present=tuple(present))

    def _enlarged(self, state: State, old: Buffer, slots: int) -> Buffer:
        buffer = self._buffer(state)
        content, valid = buffer.array, [slice(size) for size in old.shape]
        if state.update == "in_place":  # what stands behind is not read, and memory that nobody writes costs none
            valid[state.axis] = slice(slots)
        part = old.read()[tuple(valid)]
        content[tuple(slice(size) for size in part.shape)] = part
        buffer.write(content)
        return buffer

    def _buffer(self, state: State) -> Buffer:
        shape: List[int] = self.shape(state, self.room if state.update == "append" else self.extent, self.rows)
        # Positions stay on the host: they are small, and a rewind writes them.
        device = "cpu" if state.past == "past_positions" else self.graph.device
        return Buffer([int(np.prod(shape))] if state.update == "append" else shape, state.dtype, state.fill, device)

    def shape(self, state: State, slots: int, rows: int) -> List[int]:
        return [rows, *(slots if isinstance(axis, str) else axis for axis in state.axes[1:])]


def _resized(flat: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, flat.dtype)
    count = min(size, len(flat))
    out[:count] = flat[:count]
    return out
