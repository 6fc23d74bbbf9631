"""The state of a session between two calls, as one immutable value. A call builds the next value
and commits it with a single assignment.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.session.encoder_outputs import EncoderOutputs
from posenc_export.runtime.session.history import RowHistory
from posenc_export.runtime.session.stepper import Stepper

Feeds = Dict[str, np.ndarray]  # graph inputs of a call by name, without the caches
Slots = Union[slice, np.ndarray]


@dataclass(frozen=True)
class Call:
    """One run of the graph on consecutive rows."""

    first: int  # index of the first row
    rows: int  # number of rows
    new: int  # number of columns S; calls for single rows may differ in it
    feeds: Feeds
    output: int = 0  # index of the output to return, in Manifest.outputs


@dataclass(frozen=True)
class Step:
    """A repeatable run of the graph on one token per row, or on S tokens per row if there is
    `fixed`.
    """

    # Takes caches; returns the output [B,*], which the next run overwrites, and the updated caches.
    run: Callable[[Any], Tuple[np.ndarray, Any]]
    fixed: Optional[Callable[[], Any]] = (
        None  # runs the graph and writes `output`, if all states are written in place
    )
    output: Optional[np.ndarray] = (
        None  # the array that `fixed` writes: [B,*] for one token per row, otherwise [B,S,*]
    )


class Caches(Protocol):
    """The states of a batch of rows, as a value.

    Methods that return caches leave this value unchanged, except for in-place slots past the valid
    ones.
    """

    rows: int
    capacity: int

    def run(self, calls: Sequence[Call]) -> Tuple[List[Tuple[int, np.ndarray]], "Caches"]:
        """Run the graph for each call. Return pairs of row index and output [S,*], and the
        updated caches.
        """

    def step(self, feeds: Feeds, rows: int) -> Step:
        """Prepare a repeatable run of the tokens in `feeds` for each of the first `rows` rows: one
        token, or several if Step.fixed is there for one. Every run reads the current content of
        `feeds`.
        """

    def reserve(self, slots: int, rows: int) -> "Caches":
        """Return caches with room for `rows` rows of `slots` slots. No slot past `slots` may
        hold a token.
        """

    def touch(self) -> None:
        """Write the initial values to all of the memory of empty caches."""

    def cut(self, keep: np.ndarray) -> "Caches":
        """Return caches whose growing states end at the last kept column and hold their fill
        value where keep [B,columns] is False.
        """

    def wipe(self, hidden: Sequence[Slots]) -> None:
        """Write the fill value to the hidden slots of each row, in the in-place states whose
        hidden slots the graph reads.
        """

    def copy(
        self, row: int, source: Any, first: int, slots: int, begin: int = 0, at: int = 0
    ) -> None:
        """Copy `slots` slots of row `first` of `source`, caches of the same graph, from slot
        `begin` on, to row `row` from slot `at` on, in all in-place states.
        """

    def snapshot(self, row: int) -> List[np.ndarray]:
        """Return copies of one row of the states that each call replaces."""

    def restored(self, states: Dict[int, Sequence[np.ndarray]]) -> "Caches":
        """Return caches with the given rows of the states that each call replaces; an empty
        sequence resets a row to its initial state.
        """

    def emptied(self) -> "Caches":
        """Return caches in their initial state, of the initial capacity where the cost of the
        graph follows the capacity. In-place slots may keep their content.
        """

    def fork(self, rows: int, slots: int) -> "Caches":
        """Return a copy in separate memory. Of in-place states, the first `slots` slots of the
        first `rows` rows are copied.
        """

    def contents(self, rows: int, slots: int) -> List[np.ndarray]:
        """Return the first `slots` slots of the first `rows` rows of each state, as views where
        they are on the host. A growing state has one axis.
        """

    def filled(self, contents: Sequence[np.ndarray], rows: int, slots: int) -> "Caches":
        """Return these caches, which are empty, with what `contents` of the same rows and slots
        returned.
        """


@dataclass(frozen=True)
class SessionState:
    """The rows of a session and their content."""

    settled_length: (
        np.ndarray
    )  # number of tokens of each row [B] int64, without those that the stepper has read
    start: np.ndarray  # position of the first token of each row [B] int64
    slots: (
        np.ndarray
    )  # whether a column holds a token of the row [B,columns] bool; [B,0] for layout "rows"
    caches: Optional[Caches] = None  # None before the first call
    histories: Tuple[
        RowHistory, ...
    ] = ()  # one history per row if states are replaced by each call; otherwise empty
    stepper: Optional[Stepper] = (
        # Reads further tokens one at a time; the tokens that it has read count as part of this
        # state.
        None
    )
    moves: Tuple[
        Tuple[int, int], ...
    ] = ()  # pairs (source, target) of rows whose in-place states must still be copied
    encoder_outputs: Optional[EncoderOutputs] = None  # of each row, if the model reads an encoder

    @property
    def rows(self) -> int:
        """Number of rows B."""
        return len(self.settled_length)

    @property
    def length(self) -> np.ndarray:
        """Number of tokens of each row [B] int64."""
        return self.settled_length + (self.stepper.reached[0] if self.stepper else 0)

    def replace(self, **changes: Any) -> "SessionState":
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def without_stepper(self, columns: bool) -> "SessionState":
        """Return the same state without a stepper: its tokens are added to `settled_length` and,
        where rows share columns, to `slots`.
        """
        if self.stepper is None:
            return self
        steps, caches = self.stepper.reached
        slots = (
            np.concatenate((self.slots, np.ones((self.rows, steps), bool)), axis=1)
            if columns
            else self.slots
        )
        return self.replace(
            settled_length=self.settled_length + steps, slots=slots, caches=caches, stepper=None
        )


def no_rows() -> SessionState:
    """Return the state of a session without rows."""
    return SessionState(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0), bool))
