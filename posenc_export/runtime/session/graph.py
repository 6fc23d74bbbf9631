"""What a session needs of a loaded graph: its runs, and what they read and write."""

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Protocol, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, State
from posenc_export.runtime.session.buffers import CAN_RESERVE, Buffer

Feeds = Dict[str, np.ndarray]  # graph inputs of a run by name, without the caches
Shape = Tuple[int, ...]
BoundRun = Callable[[], object]


class GraphRun(NamedTuple):
    """One run of the graph on consecutive rows."""

    first: int  # index of the first row
    rows: int  # number of rows
    new: int  # number of columns S; runs for single rows may differ in it
    feeds: Feeds
    output: int = 0  # index of the output to return, in Manifest.outputs
    result: Optional[np.ndarray] = None  # memory [rows,S,*] that the graph may write the output to


class StateMemory(NamedTuple):
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


class RunMemory(List[StateMemory]):
    """The memory of the states of a run, and what a graph has bound of it for the next one."""

    bound: Any = None


class Graph(Protocol):
    """A loaded graph."""

    manifest: Manifest  # manifest of the artefact
    provider: str  # provider that runs the graph, a name that `load` takes
    device: str  # device of the buffers, "cpu" or "cuda"
    # Whether the graph accepts a view of the first slots of a buffer. Other graphs are given whole
    # buffers.
    strided: bool

    def run(self, run: GraphRun, states: Sequence[StateMemory]) -> np.ndarray:
        """Run the graph once and return its output [rows,S,*], or [rows,*] if it is pooled:
        `run.result` or another array. Raise GraphError if it failed.
        """

    def repeat(self, feeds: Feeds, states: Sequence[StateMemory], result: np.ndarray) -> BoundRun:
        """Return a function that runs the graph on the current content of `feeds` and `states`, and
        writes the first output to `result` [B,S,*]. It raises RUN_ERRORS if the graph fails.
        """


def shape_of(state: State, rows: int, slots: int) -> Shape:
    """Return the shape of a state of some rows, with this number of slots if it has them."""
    axis = state.axis
    if not axis:
        return (rows, *state.axes[1:])  # type: ignore[arg-type]
    return (rows, *state.axes[1:axis], slots, *state.axes[axis + 1 :])  # type: ignore[arg-type]


def allocates_lazily(graph: Graph) -> bool:
    """Whether caches of a graph may have more slots than are used, of which no memory is taken."""
    states = [state for state in graph.manifest.states if not state.replaced]
    moves = any([state.grows or state.reads_hidden for state in states])
    fixed = graph.strided or graph.manifest.capacity_bucket
    return CAN_RESERVE and graph.device == "cpu" and not moves and not fixed
