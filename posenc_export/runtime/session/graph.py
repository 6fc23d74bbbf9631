"""What a session needs of a loaded graph: its runs, and the memory that they read and write."""

import math
from dataclasses import dataclass
from typing import Callable, Dict, NamedTuple, Protocol, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, State
from posenc_export.runtime.session.buffer import Buffer

Feeds = Dict[str, np.ndarray]  # graph inputs of a call by name, without the caches
Shape = Tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One run of the graph on consecutive rows."""

    first: int  # index of the first row
    rows: int  # number of rows
    new: int  # number of columns S; calls for single rows may differ in it
    feeds: Feeds
    output: int = 0  # index of the output to return, in Manifest.outputs


class Bound(NamedTuple):
    """The memory of a state that one run of the graph reads and writes."""

    state: State
    past: Buffer
    present: Buffer
    rows: slice
    before: Shape  # shape that the graph reads
    after: Shape  # shape that the graph writes
    addresses: Tuple[int, int]  # of what the graph reads and writes

    @property
    def arrays(self) -> Tuple[np.ndarray, np.ndarray]:
        """Views of the memory on the host that the graph reads and writes."""
        return self._view(self.past, self.before), self._view(self.present, self.after)

    def _view(self, buffer: Buffer, shape: Shape) -> np.ndarray:
        if self.state.grows:
            return buffer.array[: math.prod(shape)].reshape(shape)
        return buffer.array[(self.rows, *[slice(size) for size in shape[1 : self.state.axis + 1]])]


class Graph(Protocol):
    """A loaded graph."""

    manifest: Manifest  # manifest of the artefact
    provider: str  # provider that runs the graph, a name that `load` takes
    device: str  # device of the buffers, "cpu" or "cuda"
    # Whether the graph accepts a view of the first slots of a buffer. Other graphs are given whole
    # buffers.
    strided: bool

    def run(self, call: Call, states: Sequence[Bound]) -> np.ndarray:
        """Run the graph on a call and return its output [rows,S,*], or [rows,*] if it is pooled.
        Raise GraphError if it failed.
        """

    def repeat(
        self, feeds: Feeds, states: Sequence[Bound], result: np.ndarray
    ) -> Callable[[], object]:
        """Return a function that runs the graph on the current content of `feeds` and `states`, and
        writes the first output to `result` [B,S,*]. It raises RUN_ERRORS if the graph fails.
        """


def shape_of(state: State, rows: int, slots: int) -> Shape:
    """Return the shape of a state of some rows, with this number of slots if it has them."""
    axis = state.axis
    if not axis:
        return (rows, *state.axes[1:])  # type: ignore[arg-type]
    return (rows, *state.axes[1:axis], slots, *state.axes[axis + 1 :])  # type: ignore[arg-type]
