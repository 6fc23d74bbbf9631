"""The rows of a session: how many tokens each holds, from which position on, in which memory.

A call computes the next `Rows`, and the session assigns them last. A step only assigns the number
of its tokens (`reached`). A call that fails or is interrupted has written behind the length of its
rows alone, and needs no repair. Writes before the length are assigned with it, as `pending`.

Shapes: B rows.
"""

from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from posenc_export.runtime.session import arguments
from posenc_export.runtime.session.arguments import Numbers, RowTokens, short_repr
from posenc_export.runtime.session.buffers import Slots
from posenc_export.runtime.session.caches import GROWS, REPLACED, Caches, Write
from posenc_export.runtime.session.errors import expected
from posenc_export.shared.tables import counted

# Attributes of Rows that are arrays [B,*].
OF_EACH_ROW = ("length", "first_position", "first_kept", "occupied")
States = Sequence[np.ndarray]
SPACING = 16  # most steps between two copies of states; a rewind replays fewer tokens than this
Token = tuple[np.ndarray, np.ndarray | None]  # [*], and its coordinates [A] if it has any


class RowHistory(NamedTuple):
    """The last tokens of a row since its oldest saved copy of states that calls replace."""

    states: Mapping[int, States] = MappingProxyType({})  # by the length before them, in its order
    tokens: Sequence[Token] = ()

    def recorded(
        self, limit: int, length: int, new: Sequence[Token], current: Callable[[], States]
    ) -> "RowHistory":
        """Return the history of a row of `length` tokens to which new tokens are about to be fed.
        Drops records from `length` on, which a rewind or a call that raised left, and old records
        that are not needed to take back `limit` tokens. current: returns the states.
        """
        states = {at: known for at, known in self.states.items() if at < length}
        if len(new) > 1 or length - max(states, default=-SPACING) >= SPACING:
            states[length] = current()
        first = self.reach(length)
        tokens = [*self.tokens[: length - first], *new]
        begin = max((at for at in states if length - at >= limit), default=next(iter(states)))
        kept = {at: known for at, known in states.items() if at >= begin}
        return RowHistory(kept, tokens[begin - first :])

    def reach(self, length: int) -> int:
        """Return the smallest length that a row of `length` tokens can be rewound to."""
        return next(iter(self.states), length)

    def back_to(self, target: int) -> tuple[int, Sequence[Token]]:
        """Return the last length up to `target` whose states are saved, and the tokens to read
        again from there.
        """
        first, last = self.reach(target), max(at for at in self.states if at <= target)
        return last, self.tokens[last - first : target - first]


@dataclass(slots=True, eq=False)
class Rows:
    """B rows. New rows have no tokens; `replace` makes others. No method
    runs a graph. Methods that return the next rows leave these as they are, but for `begin`.
    `record`, `unbind`, `step_back` and steps (runner.py) change these.
    """

    caches: Caches  # the memory of the rows
    # Position of the first token of each row [B] int64.
    first_position: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int64))
    # Number of tokens of every row that steps have read since, and `turn`. New rows beside others
    # in this memory have the `turn` of these, so that their first run keeps what the others read.
    reached: tuple[int, int] = (0, 0)
    count: int = field(init=False)  # number of rows B
    # First token of each row [B] int64 that caches of windows hold.
    first_kept: np.ndarray = field(init=False)
    # One per row if states are replaced by each call; otherwise none.
    histories: tuple[RowHistory, ...] = ()
    pending: tuple[Write, ...] = ()  # writes to the memory that must precede a run of the graph
    # Encoder outputs of each row by graph input, if the model reads an encoder.
    encoder: dict[str, np.ndarray] = field(default_factory=dict)
    # Bindings (runner.py) of steps and of passes of S tokens per row, by S, which is 1 for steps.
    bound: dict[int, Any] = field(default_factory=dict)
    # Number of tokens per row that these can read before the limits of the rows must be checked
    # again; -1 during a step and after one that failed or was interrupted.
    ready: int = 0
    # `length` and `occupied` without the tokens of steps.
    _length: np.ndarray = field(init=False)
    _occupied: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.first_position = self.first_position.copy()
        self._length = self.first_kept = np.zeros_like(self.first_position)
        self.count = len(self._length)
        self._occupied = np.zeros((self.count, 0), bool)
        if self.caches.replaces:
            self.histories = (RowHistory(),) * self.count

    @property
    def length(self) -> np.ndarray:
        """Number of tokens of each row [B] int64."""
        steps = self.reached[0]
        return self._length + steps if steps else self._length

    @property
    def occupied(self) -> np.ndarray:
        """Whether a column holds a token of the row [B,columns] bool; [B,0] for layout "rows"."""
        steps = self.reached[0]
        if not (steps and self.caches.by_columns):
            return self._occupied
        return np.concatenate((self._occupied, np.ones((self.count, steps), bool)), axis=1)

    @property
    def used(self) -> int:
        """Number of slots in use, of the longest row or of all columns."""
        if self.caches.by_columns:
            return self._occupied.shape[1] + self.reached[0]
        return int(self._length.max(initial=0)) + self.reached[0]

    @property
    def turn(self) -> int:
        """Which of two buffers holds the states that each run writes anew."""
        return self.reached[1]

    @property
    def room(self) -> np.ndarray:
        """Number of tokens that each row [B] int64 has room for, in positions and caches."""
        manifest, length = self.caches.graph.manifest, self.length
        room = manifest.max_positions - self.first_position - length
        return np.minimum(room, self.caches.capacity - length) if manifest.in_place else room

    def check_room(self, counts: np.ndarray) -> None:
        """Raise ValueError unless `counts` [B] more tokens fit into positions and caches."""
        manifest, first_position = self.caches.graph.manifest, self.first_position
        length = self._length + self.reached[0]
        rows = zip(first_position.tolist(), length.tolist(), counts.tolist(), strict=True)
        # Python integers do not overflow.
        position = max(*map(sum, rows), int(first_position.max()) + 1) - 1
        if position >= manifest.max_positions:
            # Rewinding helps if the rows fit without the tokens in the cache.
            fits = int((first_position + counts).max()) <= manifest.max_positions
            earlier = " or an earlier start" if first_position.any() else ""
            shorter = "rewind" if manifest.states and fits else f"give shorter rows{earlier}"
            by_grid = manifest.axes and not manifest.coordinate_range
            grid = ", which bounds the tokens of a row and their coordinates" if by_grid else ""
            remedy = f"{shorter}, or export with larger max_positions{grid}"
            raise expected(f"positions 0 .. {manifest.max_positions - 1}", position, remedy)
        longest, capacity = int((length + counts).max()), self.caches.capacity
        if longest > capacity and manifest.in_place:
            rule = f"at most {capacity} tokens of a row in the cache"
            raise expected(rule, longest, "open the session with a larger capacity")

    def check_start(self, counts: np.ndarray, start: Numbers) -> np.ndarray:
        """Check `start` of a prefill of `counts` [B] tokens. Return the position of each row's
        first token [B] int64. Raise ValueError for another number of rows, or positions where a row
        with tokens does not continue.
        """
        count = len(counts)
        asked = np.zeros(count, np.int64)
        if start is not None:
            asked = arguments.per_row("start", start, count)
        if self.reached[0] or self._length.any():
            length = self.length
            if count != self.count:
                rule = f"{counted(self.count, 'row')} as in the cache"
                raise expected(rule, count, "reset first")
            following = self.first_position + length
            if start is not None and (asked != following)[counts > 0].any():
                rule = f"start {short_repr(following.tolist())}, where rows of "
                rule += f"{short_repr(length.tolist())} cached tokens continue"
                raise expected(rule, short_repr(start), "leave start out, or reset first")
            return self.first_position
        if self.caches.graph.manifest.signature == "mask" and asked.any():
            remedy = "export with signature positions"
            raise expected("start 0 for signature mask", short_repr(start), remedy)
        return self.first_position if start is None and count == self.count else asked

    def replace(self, **changes: Any) -> "Rows":
        """Return rows with other attributes (`turn` for the second of `reached`), on which no step
        is bound.
        """
        rows, (steps, turn) = object.__new__(Rows), self.reached
        for name in Rows.__slots__:
            setattr(rows, name, changes.get(name, getattr(self, name)))
        rows.reached, rows.bound, rows.ready = (0, changes.get("turn", turn)), {}, 0
        rows._length = changes.get("length", self.length if steps else self._length)
        rows.count = len(rows._length)
        rows._occupied = changes.get("occupied", self.occupied if steps else self._occupied)
        return rows

    def unbind(self) -> None:
        """Drop the bindings of steps, and count the slots that steps may have written."""
        columns = max(self.bound, default=0) if self.ready < 0 else 0
        used = self.used if self.caches.by_columns else self.length
        self.caches.mark_written(slice(0, self.count), used + columns)
        self.bound, self.ready = {}, 0

    def step_back(self, counts: list[int]) -> bool:
        """Take back tokens of each row if the bound step can go on from there: the same number of
        all rows, whose keys are kept. Return whether it was done.
        """
        caches, bound, ready, count = self.caches, self.bound, self.ready, counts[0]
        if ready <= 0 or self.histories or caches.by_columns:
            return False
        reach = self._kept_from() if caches.window.size else 0
        if min(counts) < max(counts) or (self.length - count < reach).any():
            return False
        self.unbind()
        self.reached = (self.reached[0] - count, self.turn)
        if caches.reads_hidden:
            self.wipe()
        self.bound, self.ready = bound, ready + count
        return True

    def begin(self, slots: int) -> "Rows":
        """Give new rows, these, room for `slots` slots each, and return them. They take the memory
        of the caches if its number of rows fits. No other rows may have tokens there.
        """
        count, caches, alike = self.count, self.caches.emptied(), self.caches.by_columns
        if caches.rows and (caches.rows != count if alike else caches.rows < count):
            caches = caches.empty()
        count = count if alike else max(count, caches.rows, caches.fewest_rows)
        self.caches = caches.reserve(slots, count)
        if self.histories:
            self._reset(0)
        if caches.reads_hidden:
            self.wipe()
        return self

    def append(self, new: "Rows", slots: int) -> "Rows":
        """Return the rows followed by new ones, with `slots` slots of room for each of these."""
        if not self.count:
            return new.begin(slots)
        slots = max(self.used, slots)
        caches = self.caches.reserve(slots, self.count + new.count, self.turn)
        arrays: dict[str, Any] = {
            name: np.concatenate((getattr(self, name), getattr(new, name))) for name in OF_EACH_ROW
        }
        rows = self.replace(caches=caches, histories=self.histories + new.histories, **arrays)
        rows._reset(self.count)
        return rows

    def _reset(self, first: int) -> None:
        """Write the initial values of the states that each call replaces, from row `first` on."""
        for memory in self.caches.of(REPLACED):
            for row in range(first, self.count):
                memory.buffers[self.turn].clear(row)

    def without(self, row: int) -> "Rows":
        """Return the rows without one, whose index the last row takes."""
        caches, last, turn = self.caches, self.count - 1, self.turn
        order = np.arange(last)
        order[row:] = np.where(order[row:] == row, last, order[row:])
        tokens, kept = int(self.length[last]), int(self.first_kept[last])

        def move() -> None:
            caches.mark_written(slice(row, row + 1), tokens)
            caches.copy((row, 0), caches, (last, 0), tokens, (kept, kept))
            for memory in caches.of(REPLACED):
                memory.buffers[turn].copy_rows(row, memory.buffers[turn], last, 1)

        left: dict[str, Any] = {name: getattr(self, name)[order] for name in OF_EACH_ROW}
        return self.replace(
            caches=caches if last else caches.empty(),
            histories=tuple(self.histories[index] for index in order if self.histories),
            pending=(move,) if row < last else (),
            encoder={name: array[order] for name, array in self.encoder.items()},
            **left,
        )

    def rewound(self, target: np.ndarray) -> tuple["Rows", RowTokens]:
        """Return rows of at most `target` tokens [B] each, and the tokens to read again from there
        to reach it. Raise ValueError if no copy of states is left there, or if caches of windows no
        longer hold keys that the next token reads.
        """
        replay: dict[int, Sequence[Token]] = {}
        writes: list[Write] = []
        length = target
        if self.histories:
            length = self.length.copy()
            pairs = zip(self.histories, length.tolist(), strict=True)
            reach = np.array([history.reach(most) for history, most in pairs])
            self._check_reach(reach, target, "recurrent states")
            for row in np.flatnonzero(target < length).tolist():
                length[row], replay[row] = self.histories[row].back_to(int(target[row]))
                states = self.histories[row].states[int(length[row])]
                for memory, value in zip(self.caches.of(REPLACED), states, strict=True):
                    writes.append(partial(memory.buffers[self.turn].write, (row,), value))
        if self.caches.window.size:
            reach = np.where(length > 0, self._kept_from(), 0)
            self._check_reach(reach, length, "keys of windows")
        rows = self.cut(length)
        return rows.replace(pending=(*rows.pending, *writes)), self._tokens_of(replay)

    def record(self, tokens: RowTokens) -> None:
        """Record in the histories the tokens that are about to be read."""
        lengths, grid = self.length.tolist(), tokens.planes.get("grid")
        histories = list(self.histories)
        for index, count in enumerate(tokens.counts.tolist()):
            if count:
                row, x = tokens.rows.start + index, tokens.x[index, :count].copy()
                places = [None] * count if grid is None else grid[:, index, :count].T.copy()
                states = partial(self.caches.snapshot, row, self.turn)
                limit, new = self.caches.rewind, list(zip(x, places, strict=True))
                histories[row] = histories[row].recorded(limit, lengths[row], new, states)
        self.histories = tuple(histories)

    def _tokens_of(self, replay: Mapping[int, Sequence[Token]]) -> RowTokens:
        """Return the tokens of some rows, by index, as a call on all rows without outputs."""
        manifest, rows = self.caches.graph.manifest, [replay.get(i, ()) for i in range(self.count)]
        tokens = [[token for token, _ in row] for row in rows]
        x, counts = arguments.padded_rows(tokens, manifest.inputs[0])
        planes: dict[str, np.ndarray] = {}
        if manifest.axes:
            grid = planes["grid"] = np.zeros((manifest.axes, *x.shape[:2]), np.int64)
            for index, row in enumerate(rows):
                for column, (_, place) in enumerate(row):
                    grid[:, index, column] = place
        return RowTokens(slice(0, self.count), x, counts, planes, -counts)  # no output is requested

    def _kept_from(self) -> np.ndarray:
        """Return the least length [B] above 0 that caches of windows can be rewound to."""
        return np.where(self.first_kept > 0, self.first_kept + self.caches.window.size - 1, 0)

    def _check_reach(self, reach: np.ndarray, target: np.ndarray, kept: str) -> None:
        if (target < reach).any():
            rule = f"a rewind to lengths of at least {reach.tolist()}, since {kept} are kept for "
            rule += f"the last {self.caches.rewind} tokens"
            raise expected(rule, target.tolist(), "open the session with rewind=N")

    def cut(self, target: np.ndarray) -> "Rows":
        """Return the first `target` tokens [B] of each row. `wipe` fills slots."""
        first_kept = np.where(target, self.first_kept, 0)
        if not self.caches.by_columns:
            return self.replace(length=target, first_kept=first_kept)
        # Columns of tokens that are gone may stay, and count as written until they are filled.
        self.caches.mark_written(slice(0, self.count), self.used + 1)
        slots = self.occupied & (np.cumsum(self.occupied, axis=1) <= target[:, None])  # [B,columns]
        columns = int(np.flatnonzero(slots.any(0)).max(initial=-1)) + 1
        writes = tuple(memory.cut(self.turn, slots, columns) for memory in self.caches.of(GROWS))
        occupied = slots[:, :columns].copy()
        return self.replace(length=target, occupied=occupied, pending=writes)

    def with_window_room(self, part: slice, counts: np.ndarray) -> "Rows":
        """Return rows whose caches of windows have room for counts [n] more tokens of some rows. In
        a row without room, the tokens that the next ones read move to the first slots, and earlier
        ones are lost. Graphs that read hidden slots also need room for padding.
        """
        caches, first_kept, writes = self.caches, self.first_kept.copy(), []
        states = caches.graph.manifest.states
        if any(state.window and state.reads_hidden for state in states):
            counts = np.full_like(counts, counts.max())
        pairs = zip(self.length[part].tolist(), counts.tolist(), strict=True)
        for row, (length, count) in enumerate(pairs, part.start):
            old = int(first_kept[row])
            if length and length + count - old > caches.window.slots:
                new = first_kept[row] = caches.window.first_kept(length)
                writes += caches.moves(row, slice(int(new) - old, length - old))
        return self.replace(first_kept=first_kept, pending=tuple(writes)) if writes else self

    def settled(self) -> "Rows":
        """Do the pending writes, and return the rows without them. Can be repeated after an
        interrupt.
        """
        for write in self.pending:
            write()
        return self.replace(pending=()) if self.pending else self

    def wipe(self) -> None:
        """Write the fill value to every written slot that holds no token, for a graph that reads
        them.
        """
        caches, slots = self.caches, self.occupied
        written, used, by_columns = caches.written, slots.shape[1], caches.by_columns
        kept = np.zeros_like(written)
        kept[: self.count] = used if by_columns else self.length
        for row in np.flatnonzero(written > kept).tolist():
            # An interrupted run counts as more slots than a full cache has.
            begin, end = int(kept[row]), min(int(written[row]), caches.extent)
            hidden: Slots = slice(begin, end)
            if by_columns and row < self.count:
                hidden = np.flatnonzero(~np.pad(slots[row], (0, end - begin)))
            first = self.first_kept[row] if row < self.count else 0
            caches.clear(row, hidden, slice(max(begin - first, 0), max(end - first, 0)))
        written[...] = kept
