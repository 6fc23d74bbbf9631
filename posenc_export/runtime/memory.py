"""The memory under the rows of a session: opened, shared by more rows, cut back, and filled where no token stands."""

from typing import Callable, List, Tuple

import numpy as np

from posenc_export.runtime.committed import Caches, Committed, Slots
from posenc_export.runtime.history import RowHistory
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.rows import Beside


class Memory:
    """Makes the next `Committed` of a session from its last one where no token is read.

    Args:
        open_caches: empty caches for so many rows of so many slots.
        manifest: description of the graph.
        batch: rows that caches have room for at first.
        most: slots that in-place caches may grow to.
        rewind: tokens of a row that can be taken back where states are replaced by each call.

    Attributes:
        written: slots of any row that a call may have written in place and that were not filled since.
    """

    def __init__(self, open_caches: Callable[[int, int], Caches], manifest: Manifest, batch: int, most: int, rewind: int) -> None:
        self.open_caches, self.manifest, self.batch, self.most, self.rewind = open_caches, manifest, batch, most, rewind
        self.columns, self.replaces = manifest.layout == "columns", any(state.update == "replace" for state in manifest.states)
        self.written = 0

    def used(self, state: Committed) -> int:
        """Slots in use, of the longest row or of all rows together, without those of the stepper."""
        return state.slots.shape[1] if self.columns else int(state.held.max(initial=0))

    def opened(self, state: Committed, starts: np.ndarray) -> Committed:
        """Empty rows, one for each start [B]; in the memory of the state, where it has room."""
        count, caches = len(starts), state.caches
        if caches is None or (caches.rows != count if self.columns else caches.rows < count):
            room = count if self.columns else max(count, self.batch)
            caches = self.open_caches(room, min(self.manifest.capacity_bucket or self.most, self.most))
        else:
            caches = caches.emptied()
        opened = Committed(np.zeros_like(starts), starts.copy(), np.zeros((count, 0), bool), caches, self._histories(count))
        self.wipe(opened)
        return opened

    def joined(self, state: Committed, starts: np.ndarray) -> Committed:
        """The state with an empty row for each start [n] behind its own."""
        assert state.caches is not None
        first, end = state.rows, state.rows + len(starts)
        caches = state.caches.reserve(self.used(state), end)
        if self.replaces:
            caches = caches.restored({row: () for row in range(first, end)})
        held, begin = np.concatenate((state.held, np.zeros_like(starts))), np.concatenate((state.start, starts))
        return state.replace(held=held, start=begin, slots=np.zeros((end, 0), bool), caches=caches, histories=state.histories + self._histories(len(starts)))

    def without(self, state: Committed, row: int) -> Committed:
        """The state less one row, the last row at its index; what is written in place is still to be moved (`moved`)."""
        assert state.caches is not None
        last = state.rows - 1
        order = np.arange(last)
        order[row:] = np.where(order[row:] == row, last, order[row:])
        histories = tuple(state.histories[index] for index in order) if self.replaces else ()
        caches = state.caches.restored({row: state.caches.snapshot(last)}) if self.replaces else state.caches
        moves = ((last, row),) if row < last else ()
        encoded = state.encoded.ordered(order) if state.encoded else None
        rows = {"held": state.held[order], "start": state.start[order], "slots": state.slots[order], "encoded": encoded}
        return state.replace(**rows, caches=caches, histories=histories, moves=moves)

    def taken_back(self, state: Committed, target: np.ndarray) -> Tuple[Committed, List[np.ndarray], Beside]:
        """The state at or before `target` tokens [B] of each row, and the tokens and numbers of each row that lead from there to the target.

        Raises:
            ValueError: states that each call replaces are not kept for so many tokens.
        """
        none = self._no_tokens()
        again, numbers = [none] * state.rows, {"grid": [np.zeros((self.manifest.axes, 0), np.int64)] * state.rows} if self.manifest.axes else {}
        if not self.replaces:
            return self.cut(state, target), again, numbers
        reach = [history.reach(int(length)) for history, length in zip(state.histories, state.held, strict=True)]
        if (np.array(reach) > target).any():
            raise ValueError(
                f"session: expected a rewind to lengths of at least {reach}, for states that each call replaces are kept for the last {self.rewind} tokens, "
                f"got {target.tolist()}; open the session with rewind=N"
            )
        held, restored = state.held.copy(), {}
        for row in np.flatnonzero(target < state.held):
            mark, (tokens, beside) = state.histories[row].back_to(int(target[row]))
            held[row], restored[int(row)] = mark.length, mark.states
            if len(tokens):
                again[row] = tokens
                for name, part in beside.items():
                    numbers[name][row] = part
        assert state.caches is not None
        return self.cut(state.replace(caches=state.caches.restored(restored)), held), again, numbers

    def _no_tokens(self) -> np.ndarray:
        value = self.manifest.inputs[0]
        return np.zeros([0, *(int(axis) for axis in value.axes[2:])], value.dtype)

    def cut(self, state: Committed, target: np.ndarray) -> Committed:
        """The state with the first `target` tokens [B] of each row; what is written in place is still to be filled (`tidy`)."""
        assert state.caches is not None
        if not self.columns:
            return state.replace(held=target)
        slots = state.slots & (np.cumsum(state.slots, axis=1) <= target[:, None])
        caches = state.caches.cut(slots)
        return state.replace(held=target, slots=slots[:, : int(np.flatnonzero(slots.any(0)).max(initial=-1)) + 1].copy(), caches=caches)

    def moved(self, state: Committed) -> Committed:
        """The state with its rows moved. May be broken off and done again until it is committed: sources stay as they are."""
        for source, target in state.moves:
            assert state.caches is not None
            state.caches.move(source, target, int(state.held[target]))
        return state.replace(moves=())

    def tidy(self, state: Committed) -> None:
        """Fill slots and end histories behind the tokens that are held. May be broken off and done again."""
        if state.caches is not None:
            self.wipe(state)
            for row, history in enumerate(state.histories):
                history.cut(int(state.held[row]))

    def mark(self, state: Committed) -> None:
        """Count the slots in use as written, and those of the stepper, that of a step which broke off among them."""
        self.written = max(self.written, self.used(state) + (state.stepper.reached[0] + 1 if state.stepper else 0))

    def wipe(self, state: Committed) -> None:
        """Fill every written slot that holds no token of the state."""
        assert state.caches is not None
        written, slots = self.written, state.slots
        hidden: List[Slots] = [slice(0, written)] * state.caches.rows
        for row, count in enumerate(state.length):
            hidden[row] = slice(int(count), written)
            if self.columns:
                kept = np.zeros(max(written, slots.shape[1]), bool)
                kept[: slots.shape[1]] = slots[row]
                hidden[row] = np.flatnonzero(~kept)
        state.caches.wipe(hidden)
        self.written = slots.shape[1] if self.columns else int(state.length.max(initial=0))

    def _histories(self, count: int) -> Tuple[RowHistory, ...]:
        return tuple(RowHistory(self.rewind) for _ in range(count)) if self.replaces else ()
