"""The rows of a session: what they hold, and the one length that all calls go by.

A call writes behind the length of its rows and assigns the next state, or a step the number of its
tokens, as its last act: what a call leaves that fails or is interrupted lies behind the length.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.session import argument_arrays, arguments, discarding, errors, prefixes
from posenc_export.runtime.session.caches import Caches, Move, write_moves
from posenc_export.runtime.session.encoder_outputs import EncoderOutputs
from posenc_export.runtime.session.stepper import Stepper

ALL = np.iinfo(np.int64).max
SPACING = 16  # steps between two snapshots; a rewind replays fewer tokens than this
# Tokens [count,*] of one call, and their coordinates by graph input, [A,count] int64 each.
Part = Tuple[np.ndarray, Dict[str, np.ndarray]]


@dataclass
class Snapshot:
    """The states of a row at one length, and the tokens fed after it."""

    length: int  # number of tokens of the row
    states: Sequence[np.ndarray]  # values of this row in the states that calls replace
    parts: List[Part] = field(default_factory=list)  # tokens fed since, one entry per call

    @property
    def end(self) -> int:
        """Number of tokens of the row after the last part."""
        return self.length + sum(len(tokens) for tokens, _ in self.parts)

    def first(self, count: int) -> Part:
        """Return the first `count` tokens fed after the snapshot, and their attributes."""
        if not count:
            return np.zeros(0, np.int64), {}
        tokens = np.concatenate([tokens for tokens, _ in self.parts])
        attributes = {}
        for name in self.parts[0][1]:
            numbers = [part[name] for _, part in self.parts]
            attributes[name] = np.concatenate(numbers, axis=1)[:, :count]
        return tokens[:count], attributes


class RowHistory:
    """Snapshots of one row, oldest first, with every token fed since the first one. Those before
    the last `limit` tokens, which can be taken back, are dropped.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.snapshots: List[Snapshot] = []

    def needs_snapshot(self, length: int, count: int) -> bool:
        """Whether `record` of `count` tokens needs the states before them. What was recorded past
        `length`, before a rewind or by a call that raised, is dropped.
        """
        self._cut(length)
        if not self.snapshots or count > 1:
            return True
        return length - self.snapshots[-1].length >= SPACING

    def record(self, length: int, states: Optional[Sequence[np.ndarray]], part: Part) -> None:
        """Record tokens that are about to be fed to a row; states are those before, if needed."""
        part = part[0].copy(), {name: numbers.copy() for name, numbers in part[1].items()}
        if states is None:
            self.snapshots[-1].parts.append(part)
            return
        self.snapshots.append(Snapshot(length, states, [part]))
        while len(self.snapshots) > 1 and length - self.snapshots[1].length >= self.limit:
            self.snapshots.pop(0)

    def reach(self, length: int) -> int:
        """Return the smallest length that a row of `length` tokens can be rewound to."""
        return self.snapshots[0].length if self.snapshots else length

    def back_to(self, target: int) -> Tuple[Snapshot, Part]:
        """Return the last snapshot at or before `target`, and the tokens to replay from there."""
        snapshot = [snapshot for snapshot in self.snapshots if snapshot.length <= target][-1]
        return snapshot, snapshot.first(target - snapshot.length)

    def _cut(self, length: int) -> None:
        while self.snapshots and self.snapshots[-1].length > length:
            self.snapshots.pop()
        if self.snapshots and self.snapshots[-1].end > length:
            snapshot, count = self.snapshots[-1], length - self.snapshots[-1].length
            snapshot.parts = [snapshot.first(count)] if count else []

    def copy(self) -> "RowHistory":
        """Return an independent copy, for a fork."""
        other = RowHistory(self.limit)
        other.snapshots = [replace(kept, parts=list(kept.parts)) for kept in self.snapshots]
        return other


class SessionState:
    """The rows of a session and their content. Methods return the next state; none runs a graph.
    Only steps change a state, by an assignment to `reached`.

    Args:
        caches, rewind: their memory; how many tokens can be taken back if calls replace states.
        length, first_position: number of tokens, and position of the first, of each row [B] int64.
        occupied: whether a column holds a token of the row [B,columns]; [B,0] for layout "rows".
        intact: number of first tokens of each row [B] int64 that were read before all discarded
            ones; ALL without any.
        histories: one per row if states are replaced by each call; otherwise none.
        moves, shifts: pairs (source, target) of rows whose in-place states must still be copied,
            and tokens that must still be written to the slots of others that were discarded.
        encoder_outputs: those of each row, if the model reads an encoder.

    Attributes:
        reached: number of tokens of every row that steps have read since, and the caches after
            them.
        stepper: what is bound for the next step, or None.
    """

    __slots__ = (
        "reached", "stepper", "rewind", "first_position", "intact", "histories", "moves",
        "shifts", "encoder_outputs", "_length", "_occupied",
    )  # fmt: skip

    def __init__(
        self,
        caches: Caches,
        rewind: int,
        length: np.ndarray,
        first_position: np.ndarray,
        occupied: np.ndarray,
        intact: np.ndarray,
        histories: Tuple[RowHistory, ...] = (),
        moves: Tuple[Tuple[int, int], ...] = (),
        shifts: Tuple[Move, ...] = (),
        encoder_outputs: Optional[EncoderOutputs] = None,
    ) -> None:
        self.reached: Tuple[int, Caches] = (0, caches)
        self.stepper: Optional[Stepper] = None
        self.rewind, self.first_position, self.intact = rewind, first_position, intact
        self.histories, self.moves, self.shifts = histories, moves, shifts
        self.encoder_outputs = encoder_outputs
        self._length, self._occupied = length, occupied  # without the tokens of steps

    @classmethod
    def empty(cls, caches: Caches, rewind: int) -> "SessionState":
        """Return the state of a session without rows."""
        none = np.zeros(0, np.int64)
        return cls(caches, rewind, none, none, np.zeros((0, 0), bool), none)

    @property
    def caches(self) -> Caches:
        """The memory of the rows."""
        return self.reached[1]

    @property
    def rows(self) -> int:
        """Number of rows B."""
        return len(self._length)

    @property
    def length(self) -> np.ndarray:
        """Number of tokens of each row [B] int64."""
        steps = self.reached[0]
        return self._length + steps if steps else self._length

    @property
    def occupied(self) -> np.ndarray:
        """Whether a column holds a token of the row [B,columns] bool; [B,0] for layout "rows"."""
        steps = self.reached[0]
        if not (steps and self.by_columns):
            return self._occupied
        return np.concatenate((self._occupied, np.ones((self.rows, steps), bool)), axis=1)

    @property
    def by_columns(self) -> bool:
        """Whether all rows advance together."""
        return self.caches.graph.manifest.by_columns

    @property
    def used(self) -> int:
        """Number of slots in use, of the longest row or of all columns."""
        return max(self._occupied.shape[1], int(self._length.max(initial=0))) + self.reached[0]

    def replace(self, **changes: Any) -> "SessionState":
        """Return a copy with some arguments changed, on which no step is bound."""
        state, (steps, caches) = object.__new__(SessionState), self.reached
        for name in SessionState.__slots__:
            setattr(state, name, changes.get(name, getattr(self, name)))
        state.reached, state.stepper = (0, changes.get("caches", caches)), None
        state._length = changes.get("length", self.length if steps else self._length)
        state._occupied = changes.get("occupied", self.occupied if steps else self._occupied)
        return state

    def unbind(self) -> None:
        """Let the next step be bound anew, and count the slots that steps may have written."""
        assert self.stepper is not None
        behind = max(self.stepper.passes, default=1) if self.stepper.room < 0 else 0
        used = self.used if self.by_columns else self.length
        self.caches.mark_written(slice(0, self.rows), used + behind)
        self.stepper = None

    def step_back(self, counts: List[int]) -> bool:
        """Take back tokens of each row within the stepper, if possible: its binding stays valid,
        since the next step is one that it has done before. Return whether it was.
        """
        stepper, caches, count = self.stepper, self.caches, counts[0]
        if stepper is None or stepper.room <= 0 or caches.rules.replaced or self.by_columns:
            return False
        reach = caches.reach(self.rows) if caches.window.size else 0
        if min(counts) < max(counts) or (self.length - count < reach).any():
            return False
        self.unbind()
        stepper.binding.advance(self.reached[0] - count)
        self.reached = (self.reached[0] - count, caches)
        if caches.rules.read_hidden:
            self.wipe()
        stepper.room += count
        self.stepper = stepper
        return True

    def opened(self, first_position: np.ndarray, slots: int) -> "SessionState":
        """Return a state of empty rows, one for each first position [B], with `slots` slots of room
        each, in the memory of the caches if it is that of as many rows.
        """
        count, caches = len(first_position), self.reached[1].emptied()
        alike = caches.graph.manifest.by_columns
        if caches.rows and (caches.rows != count if alike else caches.rows < count):
            caches = caches.empty()
        rows = count if alike else max(count, caches.rows, caches.fewest_rows)
        caches, first, occupied = caches.reserve(slots, rows), first_position.copy(), (count, 0)
        row = np.zeros_like(first), first, np.zeros(occupied, bool), np.full_like(first, ALL)
        histories = self._histories(count) if caches.rules.replaced else ()
        state = SessionState(caches, self.rewind, *row, histories)
        if caches.rules.read_hidden:
            state.wipe()
        return state

    def joined(self, first_position: np.ndarray, slots: int) -> "SessionState":
        """Return the state with an empty row for each first position [n] after its rows."""
        if not self.rows:
            return self.opened(first_position, slots)
        first, end = self.rows, self.rows + len(first_position)
        caches = self.caches.reserve(max(self.used, slots), end)
        if self.caches.rules.replaced:
            caches = caches.restored({row: () for row in range(first, end)})
        return self.replace(
            length=np.concatenate((self.length, np.zeros_like(first_position))),
            first_position=np.concatenate((self.first_position, first_position)),
            occupied=np.zeros((end, 0), bool),
            intact=np.concatenate((self.intact, np.full_like(first_position, ALL))),
            caches=caches,
            histories=self.histories + self._histories(len(first_position)),
        )

    def begun(self, row: int, prefix: prefixes.Prefix) -> "SessionState":
        """Return the state with cached tokens in an empty row, for which there is room."""
        self.caches.mark_written(slice(row, row + 1), prefix.length)
        self.caches.notes.windows.first_kept[row] = self.caches.window.first_kept(prefix.length)
        prefix.write(self.caches, row)
        length = self.length.copy()
        length[row] = prefix.length
        return self.replace(length=length)

    def without(self, row: int) -> "SessionState":
        """Return the state without a row, whose index the last row takes; `moved` copies it."""
        last = self.rows - 1
        order = np.arange(last)
        order[row:] = np.where(order[row:] == row, last, order[row:])
        caches = self.caches if last else self.caches.empty()
        histories = self.histories
        if self.caches.rules.replaced:
            if last:
                caches = caches.restored({row: caches.snapshot(last)})
            histories = tuple(histories[index] for index in order)
        outputs = self.encoder_outputs
        return self.replace(
            length=self.length[order],
            first_position=self.first_position[order],
            occupied=self.occupied[order],
            intact=self.intact[order],
            caches=caches,
            histories=histories,
            moves=((last, row),) if row < last else (),
            encoder_outputs=outputs.ordered(order) if outputs else None,
        )

    def rewound(self, target: np.ndarray) -> Tuple["SessionState", arguments.RowTokens]:
        """Return a state at or before `target` tokens [B] of each row, and the tokens to replay
        from there. Raise ValueError if no snapshot is left there, or caches of windows no longer
        hold keys that the next token reads.
        """
        replay: Dict[int, Part] = {}
        if not self.caches.rules.replaced:
            self._check_windows(target)
            return self.cut(target), self._tokens_of(replay)
        length = self.length.copy()
        reach = [row.reach(most) for row, most in zip(self.histories, length.tolist(), strict=True)]
        self._check_reach(np.array(reach), target, "recurrent states")
        restored: Dict[int, Sequence[np.ndarray]] = {}
        for row in np.flatnonzero(target < length).tolist():
            snapshot, replay[row] = self.histories[row].back_to(int(target[row]))
            length[row], restored[row] = snapshot.length, snapshot.states
        self._check_windows(length)
        state = self.replace(caches=self.caches.restored(restored))
        return state.cut(length), self._tokens_of(replay)

    def _tokens_of(self, parts: Mapping[int, Part]) -> arguments.RowTokens:
        """Return tokens of some rows, by their index, as those of all rows."""
        manifest = self.caches.graph.manifest
        planes: Dict[str, np.ndarray] = {}
        rows = [parts[row][0] if row in parts else () for row in range(self.rows)]
        x, counts = argument_arrays.padded_rows(rows, manifest.inputs[0])
        if manifest.axes:
            planes["grid"] = np.zeros((manifest.axes, *x.shape[:2]), np.int64)
        for row, (tokens, of_row) in parts.items():
            for name, plane in of_row.items():
                planes[name][:, row, : len(tokens)] = plane
        none = np.zeros_like(counts)
        return arguments.RowTokens(slice(0, self.rows), x, counts, none, planes, none)

    def _check_windows(self, target: np.ndarray) -> None:
        """Refuse a rewind to lengths [B] whose next tokens read keys that are not kept."""
        if self.caches.window.size:
            reach = np.where(target > 0, self.caches.reach(self.rows), 0)
            self._check_reach(reach, target, "keys of windows")

    def _check_reach(self, reach: np.ndarray, target: np.ndarray, kept: str) -> None:
        if (target < reach).any():
            rule = f"a rewind to lengths of at least {reach.tolist()}, since {kept} are kept for "
            remedy = "open the session with rewind=N"
            raise errors.expected(f"{rule}the last {self.rewind} tokens", target.tolist(), remedy)

    def cut(self, target: np.ndarray) -> "SessionState":
        """Return the state with the first `target` tokens [B] of each row. `wipe` fills slots."""
        if not self.by_columns:
            intact = np.where(target > self.intact, self.intact, ALL)
            return self.replace(length=target, intact=intact)
        # Columns of tokens that are gone may stay, and count as written until they are filled.
        self.caches.mark_written(slice(0, self.rows), self.used + 1)
        slots = self.occupied & (np.cumsum(self.occupied, axis=1) <= target[:, None])  # [B,columns]
        columns = int(np.flatnonzero(slots.any(0)).max(initial=-1)) + 1
        caches = self.caches.cut(slots)
        return self.replace(length=target, occupied=slots[:, :columns].copy(), caches=caches)

    def discarded(self, counts: List[int], after: int) -> "SessionState":
        """Return the state without `counts` [B] tokens behind the first `after` of each row;
        `moved` writes later tokens to their slots. Raise ValueError if tokens cannot be moved.
        """
        caches = self.caches
        keys = discarding.check(caches)
        first, length = self.first_position.tolist(), self.length.tolist()
        shifts = tuple(
            discarding.shift(caches, keys, row, first[row], length[row], after, count)
            for row, count in enumerate(counts)
            if count
        )
        intact = np.where(counts, np.minimum(self.intact, after), self.intact)
        return self.replace(shifts=shifts, intact=intact).cut(self.length - counts)

    def moved(self) -> "SessionState":
        """Copy the in-place states of pending moves and shifts. An interrupted call can be
        repeated.
        """
        first_kept = self.caches.notes.windows.first_kept
        for source, target in self.moves:
            first_kept[target] = first_kept[source]
            tokens = int(self.length[target])
            self.caches.mark_written(slice(target, target + 1), tokens)
            self.caches.copy((target, 0), self.caches, (source, 0), tokens)
        axes = [state.axis for state in self.caches.states]
        write_moves(list(zip(axes, self.caches.past, strict=False)), self.shifts)
        for shift in self.shifts:
            first_kept[shift.row] = shift.first_kept
        return self.replace(moves=(), shifts=())

    def wipe(self) -> None:
        """Write the fill value to every written slot that holds no token, for a graph that reads
        them.
        """
        caches, lengths, slots = self.caches, self.length, self.occupied
        written, used = caches.notes.written, slots.shape[1]
        kept = np.zeros_like(written)
        kept[: self.rows] = lengths
        if (written <= (used if self.by_columns else kept)).all():
            return
        ends = np.maximum(written, kept)
        pairs = zip(kept.tolist(), ends.tolist(), strict=True)
        hidden: List[Any] = [slice(*pair) for pair in pairs]
        for row in range(self.rows if self.by_columns else 0):
            visible = np.zeros(max(int(written[row]), used), bool)
            visible[:used] = slots[row]
            hidden[row] = np.flatnonzero(~visible)
        caches.wipe(hidden)
        written[...] = used if self.by_columns else kept

    def _histories(self, count: int) -> Tuple[RowHistory, ...]:
        kept = count if self.caches.rules.replaced else 0
        return tuple([RowHistory(self.rewind) for _ in range(kept)])
