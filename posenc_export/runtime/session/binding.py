"""Graph inputs for repeated runs of the graph: their memory is bound once, and changed in place."""

from dataclasses import dataclass, field
from typing import Callable, Collection, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.session.graph import Feeds
from posenc_export.runtime.session.windows import Windows


class Binding:
    """Memory of the graph inputs `feeds`, which it takes over, for S tokens per row, and of the
    output `result` [B,S,*].
    """

    def __init__(
        self, feeds: Feeds, tokens: str, counters: Collection[str], result: np.ndarray
    ) -> None:
        self.counters = _joined(feeds, counters)  # they grow by one per token; an array per dtype
        self.feeds, self.tokens, self.result = feeds, feeds[tokens], result  # tokens [B,S,*]
        self.taken = 0  # number of tokens for which the counters stand
        # Functions that run the graph, by the addresses of the states; empty if all are in place.
        self.runs: Dict[Tuple[int, ...], Callable[[], object]] = {}

    def set(self, feeds: Feeds) -> None:
        """Overwrite the graph inputs with others of the same shapes."""
        self.taken = 0
        for name, array in feeds.items():
            self.feeds[name][...] = array

    def advance(self, count: int) -> None:
        """Let the counters stand for `count` tokens."""
        if count != self.taken:
            for counter in self.counters:
                counter += count - self.taken
            self.taken = count


@dataclass
class BufferNotes:
    """What is known of the content of buffers, and where they are bound."""

    # Slots of each row that may have been written in place and not filled or released since [R]
    written: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    windows: Windows = field(default_factory=Windows)
    bindings: Dict[object, Binding] = field(default_factory=dict)


def _joined(feeds: Feeds, counters: Collection[str]) -> List[np.ndarray]:
    """Store the counters among the feeds in one array per dtype, which one addition increments."""
    joined: List[np.ndarray] = []
    for dtype in {feeds[name].dtype for name in feeds if name in counters}:
        names = [name for name in feeds if name in counters and feeds[name].dtype == dtype]
        joined.append(np.concatenate([feeds[name].reshape(-1) for name in names]))
        begin = 0
        for name in names:
            shape, size = feeds[name].shape, feeds[name].size
            feeds[name] = joined[-1][begin : begin + size].reshape(shape)
            begin += size
    return joined
