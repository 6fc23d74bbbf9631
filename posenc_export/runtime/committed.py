"""What a session holds between two calls, as one value: a call makes the next one and puts it in place in a single store."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.encoded import Encoded
from posenc_export.runtime.feeds import Feeds
from posenc_export.runtime.history import RowHistory
from posenc_export.runtime.stepper import Stepper

Slots = Union[slice, np.ndarray]


@dataclass(frozen=True)
class Call:
    """One run of the graph on neighbouring rows.

    Args:
        first: the first row.
        rows: how many.
        feeds: graph inputs of these rows, caches left out.
    """

    first: int
    rows: int
    feeds: Feeds


@dataclass(frozen=True)
class Step:
    """A run of one token per row that can be repeated.

    Args:
        run: takes caches; the output [B,*], which the next run overwrites, and the caches behind it.
        fixed: where every state is written in place, a call without arguments that does the same to `output`; None elsewhere.
        output: what `fixed` writes [B,*].
    """

    run: Callable[[Any], Tuple[np.ndarray, Any]]
    fixed: Optional[Callable[[], Any]] = None
    output: Optional[np.ndarray] = None


class Caches(Protocol):
    """The states of some rows as a value: what returns caches leaves these as they are, except for the slots written in place behind the valid ones."""

    rows: int
    capacity: int

    def run(self, calls: Sequence[Call]) -> Tuple[List[Tuple[int, np.ndarray]], "Caches"]:
        """Run the graph for each call; each row with its output [S,*], and the states behind them."""

    def step(self, feeds: Feeds, rows: int) -> Step:
        """How to run one token for each of the first `rows` rows, reading `feeds` anew each time."""

    def reserve(self, slots: int, rows: int) -> "Caches":
        """Room for `rows` rows of `slots` slots; no slot behind these holds a token."""

    def cut(self, keep: np.ndarray) -> "Caches":
        """Growing states with the columns behind the last kept one dropped and those not kept [B,columns] filled."""

    def wipe(self, hidden: Sequence[Slots]) -> None:
        """Fill the hidden slots of each row of states that are written in place, where the graph would read them."""

    def move(self, source: int, target: int, slots: int) -> None:
        """Copy the first `slots` slots of row source over row target, in states written in place."""

    def snapshot(self, row: int) -> List[np.ndarray]:
        """Copies of the states of a row that each call replaces."""

    def restored(self, states: Dict[int, Sequence[np.ndarray]]) -> "Caches":
        """The states that each call replaces, of some rows put back; those of an empty sequence as they were at first."""

    def emptied(self) -> "Caches":
        """As at first, but for slots written in place."""

    def fork(self, rows: int, slots: int) -> "Caches":
        """The same content of the first `slots` slots in memory of its own."""


@dataclass(frozen=True)
class Committed:
    """Rows of a session and what they hold.

    Args:
        held: tokens of each row, without those that the stepper took [B] int64.
        start: position of the first token of each row [B] int64.
        slots: which columns hold a token of each row [B,columns] bool; [B,0] where rows fill their own first slots.
        caches: None before the first call.
        histories: one for each row where states are replaced by each call, else empty.
        stepper: takes tokens one at a time from here; its count belongs to the state.
        moves: rows (source, target) still to be copied.
        encoded: what an encoder gave for each row, where the model reads one.
    """

    held: np.ndarray
    start: np.ndarray
    slots: np.ndarray
    caches: Optional[Caches] = None
    histories: Tuple[RowHistory, ...] = ()
    stepper: Optional[Stepper] = None
    moves: Tuple[Tuple[int, int], ...] = ()
    encoded: Optional[Encoded] = None

    @property
    def rows(self) -> int:
        """Rows B."""
        return len(self.held)

    @property
    def length(self) -> np.ndarray:
        """Tokens of each row [B] int64."""
        return self.held + (self.stepper.reached[0] if self.stepper else 0)

    def replace(self, **changes: Any) -> "Committed":
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)

    def without_stepper(self, columns: bool) -> "Committed":
        """The tokens that the stepper took counted in `held` and, where rows share columns, in `slots`."""
        if self.stepper is None:
            return self
        taken, caches = self.stepper.reached
        slots = np.concatenate((self.slots, np.ones((self.rows, taken), bool)), axis=1) if columns else self.slots
        return self.replace(held=self.held + taken, slots=slots, caches=caches, stepper=None)


def nothing() -> Committed:
    """No rows."""
    return Committed(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0), bool))
