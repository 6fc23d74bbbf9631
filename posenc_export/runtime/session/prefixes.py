"""Caches of the first tokens of rows, kept for rows that begin alike."""

from collections import OrderedDict
from typing import Callable, List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.state import Caches

BLOCK = 32  # default number of tokens that are kept and found together
Place = Tuple[
    Union[int, str], bytes
]  # block of the tokens before these, or the key of the owner for the first ones; ids of the tokens


class Prefix(NamedTuple):
    """Cached tokens with which a row can begin. It is valid until more tokens are saved."""

    caches: Caches
    blocks: List[int]  # rows of `caches`
    size: int = BLOCK  # tokens of a block

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.size * len(self.blocks)

    def write(self, caches: Caches, row: int) -> None:
        """Copy the tokens to the first slots of a row of other caches."""
        for index, block in enumerate(self.blocks):
            caches.copy(row, self.caches, block, self.size, at=self.size * index)


class Prefixes:
    """A tree of prefixes in blocks of a few tokens, within a fixed memory. The blocks used least
    recently are replaced by new ones.

    Of a path in the tree, blocks nearer to the root count as used later, so that a replaced block
    never has one after it. Tokens are compared one by one.

    Args:
        open_caches: function of a number of rows and a number of slots; returns empty caches.
        count: number of blocks in memory, at least 1.
        size: tokens of a block, which are kept and found together.

    Attributes:
        hits: number of prefixes found.
        tokens: number of tokens in them.
    """

    def __init__(
        self, open_caches: Callable[[int, int], Caches], count: int, size: int = BLOCK
    ) -> None:
        self._caches, self._size = open_caches(count, size), size
        self._blocks: "OrderedDict[Place, int]" = OrderedDict()  # least recently used first
        self._unused = list(reversed(range(count)))
        self.hits = self.tokens = 0

    @property
    def used(self) -> int:
        """Number of blocks that hold tokens."""
        return len(self._blocks)

    def find(self, tokens: Sequence[int], key: str = "") -> Prefix:
        """Return the longest known prefix of a row, which leaves at least its last token to be
        read.

        Args:
            tokens: ids of the row, from position 0 on.
            key: only prefixes saved with the same key are found.
        """
        path = self._path(_parts(tokens[:-1], self._size), key)
        self._use(path)
        self.hits, self.tokens = self.hits + bool(path), self.tokens + self._size * len(path)
        return Prefix(self._caches, [self._blocks[place] for place in path], self._size)

    def save(self, caches: Caches, row: int, tokens: Sequence[int], key: str = "") -> None:
        """Copy those blocks of a row of `caches` that are not known yet. `tokens` are the ids in
        its first slots, from position 0 on.
        """
        parts = _parts(tokens, self._size)
        path = self._path(parts, key)
        try:
            for part in parts[len(path) :]:
                if not self._unused and not self._freed(path):
                    return
                block, place = self._unused[-1], (self._blocks[path[-1]] if path else key, part)
                self._caches.copy(block, caches, row, self._size, begin=self._size * len(path))
                self._blocks[place] = self._unused.pop()
                path.append(place)
        finally:
            self._use(path)

    def _path(self, parts: List[bytes], key: str) -> List[Place]:
        """Return the places of the known blocks with which `parts` begin."""
        path: List[Place] = []
        for part in parts:
            place = (self._blocks[path[-1]] if path else key, part)
            if place not in self._blocks:
                break
            path.append(place)
        return path

    def _use(self, path: List[Place]) -> None:
        for place in reversed(path):
            self._blocks.move_to_end(place)

    def _freed(self, path: List[Place]) -> bool:
        """Free the block used least recently. Return False if it belongs to `path`."""
        oldest = next(iter(self._blocks))
        if oldest in path:
            return False
        self._unused.append(self._blocks.pop(oldest))
        return True


def can_share(manifest: Manifest) -> bool:
    """Whether cached tokens of a row can be copied to another: all states are written in place,
    in slots of the row.
    """
    return manifest.layout == "rows" and all(
        state.update == "in_place" for state in manifest.states
    )


def _parts(tokens: Sequence[int], size: int) -> List[bytes]:
    ids = np.asarray(tokens, np.int64)
    return [ids[end - size : end].tobytes() for end in range(size, len(ids) + 1, size)]
