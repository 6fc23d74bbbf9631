"""What a session needs of a loaded graph: runs on the memory of its inputs, states and output."""

from typing import Any, Callable, Dict, List, NamedTuple, Protocol, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, State
from posenc_export.runtime.session.buffers import Buffer

Feeds = Dict[str, np.ndarray]  # graph inputs of a run by name, without the caches
Shape = Tuple[int, ...]
BoundRun = Callable[[], object]


class StateMemory(NamedTuple):
    """The memory of a state that one run of the graph reads and writes."""

    state: State
    past: Buffer
    present: Buffer
    first: int  # index of the first row of the run
    before: Shape  # shape that the graph reads
    after: Shape  # shape that the graph writes

    @property
    def arrays(self) -> Tuple[np.ndarray, np.ndarray]:
        """Views of the rows on the host that the graph reads and writes, of a state that does not
        grow.
        """
        rows = slice(self.first, self.first + self.before[0])
        return self.past.array[rows], self.present.array[rows]


class RunMemory(List[StateMemory]):
    """The memory of the states of a run, and what a graph keeps of it for the next one."""

    bound: Any = None


class Graph(Protocol):
    """A loaded graph."""

    manifest: Manifest  # manifest of the artefact
    provider: str  # provider that runs the graph, a name that `load` takes
    device: str  # device of the buffers, "cpu" or "cuda"

    def bind(
        self,
        feeds: Feeds,
        states: RunMemory,
        result: np.ndarray,
        output: int = 0,
        once: bool = False,
    ) -> BoundRun:
        """Return a function that runs the graph on the current content of `feeds` and `states`, and
        writes an output to `result` [B,S,*], or [B,*] if it is pooled. It raises RUN_ERRORS if the
        graph fails.

        Args:
            output: index in Manifest.outputs.
            once: whether the function is called once, before another is bound to `states`.
        """
