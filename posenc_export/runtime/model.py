"""A loaded artefact: its graph and weights once, for any number of sessions."""

from typing import Any, Optional

from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.session import REWIND, Session


class Model:
    """What `load` gives. It may be shared between threads; a session belongs to one.

    Args:
        graph: OrtGraph, OpenVinoGraph or TorchGraph.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    @property
    def manifest(self) -> Manifest:
        """Description of the artefact."""
        return self.graph.manifest  # type: ignore[no-any-return]

    @property
    def provider(self) -> str:
        """What runs the graph: a name of `load`, and never "auto"."""
        return str(self.graph.device)

    def session(self, batch: int = 1, capacity: Optional[int] = None, rewind: int = REWIND) -> Session:
        """Empty caches on this graph.

        Args:
            batch: rows that the caches have room for at once; more rows, in a prefill or admitted later, move them into larger memory.
            capacity: most tokens of a row in caches that are written in place; the whole range of positions where None.
            rewind: tokens that can be taken back, from the furthest a row has read, where states are replaced by each call (recurrent encodings, linear
                attention).

        Raises:
            ValueError: a number below 1, or that is not whole.
        """
        for name, value in (("batch", batch), ("capacity", 1 if capacity is None else capacity), ("rewind", rewind)):
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"session: expected {name} as a whole number of at least 1, got {value!r}")
        return Session(self.graph.open, self.manifest, batch, capacity, rewind, self.provider)
