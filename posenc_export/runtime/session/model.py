"""A loaded artefact: one graph with its weights, shared by any number of sessions."""

from typing import Any, Optional

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.session import REWIND, Session


class Model:
    """A loaded artefact, as returned by `load`. Threads may share a model; each session must be used by one thread at a time.

    Args:
        graph: OrtGraph or TorchGraph.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    @property
    def manifest(self) -> Manifest:
        """The manifest of the artefact."""
        return self.graph.manifest  # type: ignore[no-any-return]

    @property
    def provider(self) -> str:
        """The provider that runs the graph, as `load` takes it, never "auto"."""
        return str(self.graph.provider)

    def session(self, batch: int = 1, capacity: Optional[int] = None, rewind: int = REWIND) -> Session:
        """Open a session with empty caches on this graph.

        Args:
            batch: number of rows to allocate caches for. If a prefill or an admit needs more rows, the caches are moved to larger memory.
            capacity: largest number of tokens per row in caches that are written in place; None allows the whole range of positions.
            rewind: number of tokens, counted from the longest length a row has had, that `Session.rewind` can take back if states are replaced by each call
                (recurrent encodings, linear attention). Memory grows with it.

        Raises:
            ValueError: an argument is not a whole number of at least 1.
        """
        for name, value in (("batch", batch), ("capacity", 1 if capacity is None else capacity), ("rewind", rewind)):
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"session: expected {name} to be a whole number of at least 1, got {value!r}; leave it out for the default")
        return Session(self.graph.open, self.manifest, batch, capacity, rewind, self.provider)
