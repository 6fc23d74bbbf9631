"""Caches of the first tokens of rows, kept for rows that begin alike."""

from collections import OrderedDict
from typing import NamedTuple, Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.caches import Caches, Graph
from posenc_export.runtime.session.rows import Rows

BLOCK = 32  # default number of tokens that are kept and found together
# Block of the tokens before these, or the key of the owner for the first ones; ids of the tokens.
Node = tuple[int | str, bytes]


class Prefix(NamedTuple):
    """Cached tokens with which a row can begin. It is valid until more tokens are saved."""

    caches: Caches  # with a block in each row
    blocks: list[int]  # their rows
    size: int  # tokens of a block

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.size * len(self.blocks)

    def write(self, rows: Rows, row: int) -> Rows:
        """Copy the tokens to an empty row with room for them, and return the rows."""
        length, first_kept = rows.length.copy(), rows.first_kept.copy()
        length[row] = self.length
        first_kept[row] = kept = rows.caches.window.first_kept(self.length)
        rows.caches.mark_written(slice(row, row + 1), self.length)
        for index, block in enumerate(self.blocks):
            to = (row, self.size * index)
            rows.caches.copy(to, self.caches, (block, 0), self.size, (kept, 0))
        return rows.replace(length=length, first_kept=first_kept)


class Prefixes:
    """A tree of prefixes in blocks of `size` tokens, with memory for `count` blocks. On a CPU, only
    blocks that were written take memory. New blocks replace those used least recently.

    Blocks nearer to the root of a path count as used later, so no replaced block has one after it.
    Tokens are compared one by one.

    Attributes:
        hits, tokens: number of prefixes found, and of tokens in them.
    """

    def __init__(self, graph: Graph, count: int, size: int = BLOCK) -> None:
        self._caches, self._size = Caches(graph, size).reserve(size, count), size
        self._blocks: OrderedDict[Node, int] = OrderedDict()  # least recently used first
        self._unused = list(range(count))
        self.hits = self.tokens = 0

    @property
    def used(self) -> int:
        """Number of blocks that hold tokens."""
        return len(self._blocks)

    def find(self, tokens: Sequence[int], key: str = "") -> Prefix:
        """Return the longest prefix of `tokens`, ids of a row from position 0 on, that was saved
        with this key. At least the last token stays unread.
        """
        path = self._path(_parts(tokens[:-1], self._size), key)
        self._use(path)
        self.hits, self.tokens = self.hits + bool(path), self.tokens + self._size * len(path)
        return Prefix(self._caches, [self._blocks[node] for node in path], self._size)

    def save(self, rows: Rows, row: int, tokens: Sequence[int], key: str = "") -> None:
        """Copy the blocks of a row with the ids `tokens` that are not saved yet, up to one that
        caches of windows have dropped.
        """
        kept = int(rows.first_kept[row])
        parts = _parts(tokens, self._size)
        path = self._path(parts, key)
        try:
            for part in parts[len(path) :]:
                if not (self._unused or self._freed(path)):
                    return
                begin = self._size * len(path)
                if begin < kept:
                    return
                to, at = (self._unused[-1], 0), (row, begin)
                self._caches.copy(to, rows.caches, at, self._size, (0, kept))
                node = (self._blocks[path[-1]] if path else key, part)
                self._blocks[node] = self._unused.pop()
                path.append(node)
        finally:
            self._use(path)

    def _path(self, parts: list[bytes], key: str) -> list[Node]:
        path: list[Node] = []
        for part in parts:
            node = (self._blocks[path[-1]] if path else key, part)
            if node not in self._blocks:
                break
            path.append(node)
        return path

    def _use(self, path: list[Node]) -> None:
        for node in reversed(path):
            self._blocks.move_to_end(node)

    def _freed(self, path: list[Node]) -> bool:
        """Free the block used least recently. Return False if it belongs to `path`."""
        oldest = next(iter(self._blocks))
        if oldest in path:
            return False
        self._unused.append(self._blocks.pop(oldest))
        return True


def can_share(manifest: Manifest) -> bool:
    """Whether cached tokens of a row can be copied to another: all states have slots of the row."""
    return not manifest.by_columns and all(state.in_place for state in manifest.states)


def _parts(tokens: Sequence[int], size: int) -> list[bytes]:
    ids = np.asarray(tokens, np.int64)
    return [ids[end - size : end].tobytes() for end in range(size, len(ids) + 1, size)]
