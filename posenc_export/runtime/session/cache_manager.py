"""Cache memory of a session: opening it, adding and removing rows, truncating, and filling slots
without a token.
"""

from typing import Callable, List, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.arguments import TokenAttributes
from posenc_export.runtime.session.history import RowHistory
from posenc_export.runtime.session.prefixes import Prefix
from posenc_export.runtime.session.state import Caches, SessionState, Slots


class CacheManager:
    """Operations that turn one `SessionState` into the next without running the graph.

    Args:
        open_caches: function of a number of rows and a number of slots; returns empty caches.
        manifest: description of the graph.
        batch: number of rows that new caches have room for.
        capacity: largest number of slots of in-place caches.
        rewind: number of tokens of a row that can be taken back if states are replaced by each
            call.

    Attributes:
        columns: whether all rows advance together (layout "columns").
        replaces: whether some states are replaced by each call.
        written: number of slots of a row that may have been written in place and not filled since,
            the largest of all rows.
    """

    def __init__(
        self,
        open_caches: Callable[[int, int], Caches],
        manifest: Manifest,
        batch: int,
        capacity: int,
        rewind: int,
    ) -> None:
        self.open_caches, self.manifest, self.batch, self.capacity, self.rewind = (
            open_caches,
            manifest,
            batch,
            capacity,
            rewind,
        )
        self.columns, self.replaces = (
            manifest.layout == "columns",
            any(state.update == "replace" for state in manifest.states),
        )
        self.written = 0

    def used(self, state: SessionState) -> int:
        """Return the number of slots in use, of the longest row (layout "rows") or of all rows
        (layout "columns"), without the stepper's tokens.
        """
        return (
            state.slots.shape[1] if self.columns else max(state.settled_length.tolist(), default=0)
        )

    def opened(self, state: SessionState, starts: np.ndarray) -> SessionState:
        """Return a state of empty rows, one for each start [B]. The caches of `state` are reused
        if they have room.
        """
        count, caches = len(starts), state.caches
        if caches is None or (caches.rows != count if self.columns else caches.rows < count):
            rows = count if self.columns else max(count, self.batch)
            caches = self.open_caches(
                rows, min(self.manifest.capacity_bucket or self.capacity, self.capacity)
            )
        else:
            caches = caches.emptied()
        opened = SessionState(
            np.zeros_like(starts),
            starts.copy(),
            np.zeros((count, 0), bool),
            caches,
            self._histories(count),
        )
        self.wipe(opened)
        return opened

    def joined(self, state: SessionState, starts: np.ndarray) -> SessionState:
        """Return the state with an empty row appended for each start [n]."""
        assert state.caches is not None
        first, end = state.rows, state.rows + len(starts)
        caches = state.caches.reserve(self.used(state), end)
        if self.replaces:
            caches = caches.restored({row: () for row in range(first, end)})
        return state.replace(
            settled_length=np.concatenate((state.settled_length, np.zeros_like(starts))),
            start=np.concatenate((state.start, starts)),
            slots=np.zeros((end, 0), bool),
            caches=caches,
            histories=state.histories + self._histories(len(starts)),
        )

    def begun(self, state: SessionState, row: int, prefix: Prefix) -> SessionState:
        """Return the state with cached tokens in an empty row."""
        assert state.caches is not None
        caches = state.caches.reserve(max(self.used(state), prefix.length), state.rows)
        self.written = max(self.written, prefix.length)
        prefix.write(caches, row)
        length = state.settled_length.copy()
        length[row] = prefix.length
        return state.replace(settled_length=length, caches=caches)

    def without(self, state: SessionState, row: int) -> SessionState:
        """Return the state without one row; the last row takes its index. Its in-place states
        are copied later, by `apply_moves`.
        """
        assert state.caches is not None
        last = state.rows - 1
        order = np.arange(last)
        order[row:] = np.where(order[row:] == row, last, order[row:])
        return state.replace(
            settled_length=state.settled_length[order],
            start=state.start[order],
            slots=state.slots[order],
            caches=state.caches.restored({row: state.caches.snapshot(last)})
            if self.replaces
            else state.caches,
            histories=tuple(state.histories[index] for index in order) if self.replaces else (),
            moves=((last, row),) if row < last else (),
            encoder_outputs=state.encoder_outputs.ordered(order) if state.encoder_outputs else None,
        )

    def rewound(
        self, state: SessionState, target: np.ndarray
    ) -> Tuple[SessionState, List[np.ndarray], TokenAttributes]:
        """Return a state at or before `target` tokens [B] of each row, and the tokens of each row
        to replay from there, with their attributes.

        Raises:
            ValueError: no snapshot of the states that each call replaces is left at or before the
                target.
        """
        tokens = self.manifest.inputs[0]
        replay = [np.zeros((0, *tokens.token_shape), tokens.dtype)] * state.rows
        attributes = (
            {"grid": [np.zeros((self.manifest.axes, 0), np.int64)] * state.rows}
            if self.manifest.axes
            else {}
        )
        if not self.replaces:
            return self.cut(state, target), replay, attributes
        reach = [
            history.reach(int(length))
            for history, length in zip(state.histories, state.settled_length, strict=True)
        ]
        if (np.array(reach) > target).any():
            raise ValueError(
                f"session: expected a rewind to lengths of at least {reach}, since recurrent "
                f"states are kept for the last {self.rewind} tokens, "
                f"got {target.tolist()}; open the session with rewind=N"
            )
        length, restored = state.settled_length.copy(), {}
        for row in np.flatnonzero(target < length):
            snapshot, (row_tokens, row_attributes) = state.histories[row].back_to(int(target[row]))
            length[row], restored[int(row)] = snapshot.length, snapshot.states
            if len(row_tokens):
                replay[row] = row_tokens
                for name, part in row_attributes.items():
                    attributes[name][row] = part
        assert state.caches is not None
        return (
            self.cut(state.replace(caches=state.caches.restored(restored)), length),
            replay,
            attributes,
        )

    def cut(self, state: SessionState, target: np.ndarray) -> SessionState:
        """Return the state truncated to the first `target` tokens [B] of each row. In-place
        slots are filled later, by `tidy`.
        """
        assert state.caches is not None
        if not self.columns:
            return state.replace(settled_length=target)
        slots = state.slots & (np.cumsum(state.slots, axis=1) <= target[:, None])
        caches = state.caches.cut(slots)
        return state.replace(
            settled_length=target,
            slots=slots[:, : int(np.flatnonzero(slots.any(0)).max(initial=-1)) + 1].copy(),
            caches=caches,
        )

    def apply_moves(self, state: SessionState) -> SessionState:
        """Copy the in-place states of pending moves and return the state without them. Sources
        are not changed, so an interrupted call can be repeated.
        """
        for source, target in state.moves:
            assert state.caches is not None
            state.caches.copy(target, state.caches, source, int(state.settled_length[target]))
        return state.replace(moves=())

    def tidy(self, state: SessionState) -> None:
        """Fill the slots past the tokens of each row and cut the histories there. An interrupted
        call can be repeated.
        """
        if state.caches is not None:
            self.wipe(state)
            for row, history in enumerate(state.histories):
                history.cut(int(state.settled_length[row]))

    def count_written(self, state: SessionState) -> None:
        """Raise `written` to the slots that the state and its stepper have used, including those
        of a run that may have been interrupted.
        """
        self.written = max(
            self.written,
            self.used(state)
            + (state.stepper.reached[0] + state.stepper.widest if state.stepper else 0),
        )

    def wipe(self, state: SessionState) -> None:
        """Write the fill value to every written slot that holds no token of the state."""
        assert state.caches is not None
        written, slots = self.written, state.slots
        hidden: List[Slots] = [slice(0, written)] * state.caches.rows
        lengths = state.length.tolist()
        for row, count in enumerate(lengths):
            hidden[row] = slice(count, written)
            if self.columns:
                visible = np.zeros(max(written, slots.shape[1]), bool)
                visible[: slots.shape[1]] = slots[row]
                hidden[row] = np.flatnonzero(~visible)
        state.caches.wipe(hidden)
        self.written = slots.shape[1] if self.columns else max(lengths, default=0)

    def _histories(self, count: int) -> Tuple[RowHistory, ...]:
        return tuple(RowHistory(self.rewind) for _ in range(count)) if self.replaces else ()
