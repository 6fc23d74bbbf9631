"""The rows B of a session, between the calls that read tokens."""

import functools
import math
from pathlib import Path
from typing import Any, Callable, List, NoReturn, Optional, Sequence, TypeVar, Union

import numpy as np

from posenc_export.runtime.session import arguments, drafts, errors, reading, saved
from posenc_export.runtime.session.argument_arrays import Numbers, Rows
from posenc_export.runtime.session.caches import FIRST, Caches
from posenc_export.runtime.session.graph import Buffer, Graph
from posenc_export.runtime.session.prefixes import Prefixes
from posenc_export.runtime.session.state import SessionState

REWIND = 256  # default number of tokens that can be taken back if states are replaced by each call
Own = TypeVar("Own", bound="CachedRows")
Method = TypeVar("Method", bound=Callable[..., Any])
BUSY = (
    "session: expected one call at a time, got another while one runs; open a session for each "
    "thread with model.session()"
)


def exclusive(method: Method) -> Method:
    """Decorate a method of a session: raise RuntimeError while another call on it runs. Appending
    to its `_guard` and removing are atomic in CPython, so that an interrupt cannot split them.
    """

    @functools.wraps(method)
    def alone(self: Any, *arguments: Any, **named: Any) -> Any:
        guard = self._guard
        try:
            guard.append(None)
            if len(guard) > 1:
                raise RuntimeError(BUSY)
            return method(self, *arguments, **named)
        finally:
            guard.pop()

    return alone  # type: ignore[return-value]


class CachedRows:
    """Rows with caches, and the calls that copy, shorten, keep and remove them. A Session adds the
    calls that read tokens.

    Args:
        graph: the loaded graph.
        batch, capacity, rewind: as for Model.session; capacity is at most the range of positions.

    Attributes:
        rewindable: number of tokens that can be taken back if states are replaced by each call.
        pass_costs: times of passes of several tokens, measured by speculative decoding.
    """

    def __init__(
        self, graph: Graph, batch: int = 1, capacity: Optional[int] = None, rewind: int = REWIND
    ) -> None:
        self.manifest, self.provider, self.rewindable = graph.manifest, graph.provider, rewind
        most = min(capacity or self.manifest.max_positions, self.manifest.max_positions)
        self._reading = reading.Reading(graph)
        self._guard: List[None] = []
        self._state = SessionState.empty(Caches.of(graph, most, batch, rewind), rewind)
        self._replaces = bool(self._state.caches.rules.replaced)
        self.pass_costs = drafts.PassCosts(self.manifest.continuation_rows == 1)

    def __reduce__(self) -> NoReturn:
        """Refuse copies that would write into the same caches or lack them."""
        rule = "expected fork() to copy a session, got copy or pickle"
        remedy = "call session.fork(), or open another with model.session()"
        raise TypeError(f"session: {rule}; {remedy}")

    @exclusive
    def reset(self) -> None:
        """Remove all rows and their tokens."""
        self._state = SessionState.empty(self._settled().caches, self.rewindable)

    @property
    def batch(self) -> int:
        """Number of rows B; 0 before the first prefill."""
        return self._state.rows

    @property
    def length(self) -> np.ndarray:
        """Number of tokens in the cache of each row [B] int64."""
        return self._state.length.copy()

    @property
    def room(self) -> np.ndarray:
        """Number of tokens that each row [B] int64 has room for, in positions and caches."""
        length, manifest = self._state.length, self.manifest
        room = manifest.max_positions - self._state.first_position - length
        return np.minimum(room, self.capacity - length) if manifest.in_place else room

    @property
    def capacity(self) -> int:
        """Largest number of tokens of a row."""
        return self._state.caches.capacity

    @property
    def memory(self) -> int:
        """Bytes of the caches. Where rows take memory as they are written, in place on the CPU,
        these are the bytes of their tokens; otherwise those of as many rows of the longest length,
        both in powers of two.
        """
        caches, total = self._state.caches, 0
        for buffer in {*caches.past, *caches.present}:
            lazy = buffer.mapping is not None  # of these, only slots that may be written count
            slots = int(caches.notes.written.sum()) if lazy else 0
            total += slots * buffer.row_bytes // caches.extent if lazy else buffer.bytes
        return total

    @exclusive
    def trim(self) -> None:
        """Return memory of tokens that have left the caches to the system, where rows take memory
        as they are written. It takes as long as a few steps.
        """
        caches = self._state.caches
        written, kept = caches.notes.written, np.zeros_like(caches.notes.written)
        kept[: self.batch] = self._state.length
        for row in np.flatnonzero(written > kept + FIRST).tolist() if caches.lazy else ():
            for state, past in zip(caches.states, caches.past, strict=True):
                if past.mapping is not None:
                    past.release(row, state.axis, int(kept[row]))
            written[row] = kept[row]

    def memory_of(self, rows: int, tokens: int) -> int:
        """Return the most bytes that the caches take while they grow to `rows` rows of `tokens`
        tokens. If the caches must move to larger memory, both memories count.
        """
        caches, now = self._state.caches, self.memory
        count, extent = 1 << (rows - 1).bit_length(), caches.fitting(tokens)
        fits = rows <= caches.rows and extent <= caches.extent
        if caches.lazy:  # `trim` leaves up to FIRST slots of a row
            count, extent, fits = rows, tokens + FIRST, rows <= max(caches.rows, caches.fewest_rows)
        elif fits:
            return now
        shapes = [(caches.shape(state, count, extent), state.dtype) for state in caches.states]
        needed = sum(math.prod(shape) * Buffer.element_bytes(dtype) for shape, dtype in shapes)
        return max(needed, now) if fits else needed + max(now, needed // 2)

    @property
    def position(self) -> np.ndarray:
        """Position of the next token of each row [B] int64."""
        state = self._state
        return state.first_position + state.length

    @exclusive
    def rewind(self, n: Numbers) -> None:
        """Take back the last n tokens of each row; n is one number for all rows, or one per row
        [B].

        Raises:
            ValueError: n exceeds the length of a row, or the history kept for states that each call
                replaces; or the model has no cache.
        """
        # Python's integers: numpy takes several us for each operation on few numbers.
        length = self._state.length.tolist()
        back = arguments.check_rewind(self.manifest, length, n)
        if not any(back) or self._state.step_back(back):
            return
        target = np.array(length) - np.array(back)
        self._state, replay = self._settled().rewound(target)
        if replay.counts.any():
            unread = np.zeros((self.batch, 0))  # no output is requested
            self._state = self._reading.run_chunk(self._settled(), replay, unread)

    @exclusive
    def discard(self, n: Numbers, after: int = 0) -> None:
        """Remove n tokens of each row behind its first `after` tokens; n is one number or [B].
        Later tokens take their positions, as if they had been read there; what they have read of
        removed tokens stays in them, so that they are no prefix to `share`. `length` and `position`
        fall by n.

        Keys that are rotated are rotated to the new positions, with the rounding of one product.

        Raises:
            ValueError: a row has fewer than `after` + n tokens; the encoding acts on the inputs of
                layers, or on keys in another way than a rotation by the position times a frequency;
                the graph does not write caches of all tokens in place on the CPU.
        """
        state = self._settled()
        counts = arguments.check_discard(self.manifest, state.length.tolist(), n, after)
        if any(counts):
            self._state = state.discarded(counts, int(after))
            self._settled()

    @exclusive
    def fork(self: Own) -> Own:
        """Return an independent session on the same graph with a copy of the current state."""
        state = self._settled()
        caches = state.caches
        other = type(self)(caches.graph, caches.fewest_rows, caches.capacity, self.rewindable)
        histories = tuple(history.copy() for history in state.histories)
        other._state = state.replace(caches=caches.fork(state.used), histories=histories)
        return other

    @exclusive
    def save(self, file: Union[str, Path], tokens: Optional[Rows] = None) -> None:
        """Write the rows of the session with their caches to a file, which Model.restore of the
        same artefact reads. An existing file is replaced at once or not at all.

        Args:
            tokens: the ids in the cache, one list per row, which are kept beside the caches for
                session.saved.tokens; None keeps none.

        Raises:
            ValueError: the ids are not as many as the cache holds, or not in the vocabulary.
            OSError: the file cannot be written.
        """
        saved.write(self._settled(), file, tokens)

    @exclusive
    def share(self, row: int, tokens: Sequence[int], prefixes: Prefixes, key: str = "") -> None:
        """Copy the caches of the first tokens of a row, which began at position 0, to `prefixes`
        (Prefixes.save).

        Raises:
            ValueError: there is no such row, it begins at another position, it has fewer tokens, or
                some of them stood behind tokens that were discarded.
        """
        arguments.check_row(row, self.batch)
        state = self._settled()
        first, length = state.first_position[row], state.length[row]
        if first or len(tokens) > length:
            got = f"{len(tokens)} of {length} tokens from position {first} on"
            rule = "tokens of a row that begins at position 0"
            raise errors.expected(rule, got, "give the tokens that were fed")
        if len(tokens) > (most := state.intact[row]):
            rule = f"at most {most} tokens, since tokens behind them were discarded"
            remedy = "give fewer, or read the text in a row of its own"
            raise errors.expected(rule, len(tokens), remedy)
        prefixes.save(state.caches, int(row), tokens, key)

    @exclusive
    def retire(self, row: int) -> None:
        """Remove a row. The last row takes its index, so that rows are 0 .. B - 2 afterwards.

        Raises:
            ValueError: there is no such row, or the target's rows share cache columns.
        """
        arguments.check_rows_are_independent(self.manifest, "retire")
        state = self._settled()
        arguments.check_row(row, state.rows)
        self._state = state.without(int(row))
        self._settled()

    def _settled(self) -> SessionState:
        """Return the state for a call that is no step: nothing is bound, what was to be moved is
        moved, also after an interrupt, and slots behind the tokens of rows are filled.
        """
        state, caches = self._state, self._state.reached[1]
        if state.stepper is not None:
            state.unbind()
        if caches.notes.windows.pending is not None:
            caches.settle()
        if state.moves or state.shifts:
            state = self._state = state.moved()
        if caches.rules.read_hidden:
            state.wipe()
        return state
