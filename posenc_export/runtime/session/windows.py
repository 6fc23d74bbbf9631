"""Caches of windows: layers that read only the last tokens of a row keep no others.

Slot s of such a cache holds token `first_kept` + s of its row. Before a call whose tokens have no
room behind them, the last tokens move to the first slots.

Shapes: R rows in memory.
"""

from dataclasses import dataclass, field
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.session.graph import Buffer, part_of

Caches = Sequence[Tuple[int, Buffer]]  # the axis of slots and the memory of each
NEW = 256  # tokens of a call that caches of windows have room for, at least


class Window(NamedTuple):
    """What caches of windows hold beside new tokens."""

    size: int = 0  # last tokens that a query reads, with its own; 0 if all caches hold all tokens
    behind: int = 0  # tokens that can be taken back
    new: int = 0  # most tokens of a row in a call

    @classmethod
    def of(cls, manifest: Manifest, provider: str, rewind: int) -> "Window":
        """Return the window of a graph. Caches are shorter where that was measured: on the CPU."""
        size = max([state.window for state in manifest.states], default=0)
        if not size or provider != "cpu":
            return cls()
        new = max(NEW, manifest.chunk)
        # States that each call replaces are restored to before a call, and its tokens read again.
        replayed = new if any([state.replaced for state in manifest.states]) else 0
        return cls(size, rewind + replayed, new)

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return self.size - 1 + self.behind + self.new

    def first_kept(self, length: int) -> int:
        """Return the first token that a row of some tokens must keep."""
        return max(length - (self.size - 1) - self.behind, 0) if self.size else 0


class Move(NamedTuple):
    """Tokens of a row on their way to other slots."""

    row: int
    first_kept: int  # token of the row in slot 0 of caches of windows afterwards
    slots: Sequence[int]  # slot of the first of them, by cache
    content: List[np.ndarray]  # of each cache


@dataclass
class Windows:
    """What the memory of caches of windows holds."""

    # Token of each row in slot 0 [R] int64
    first_kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    pending: Optional[Move] = None  # to slot 0, not complete

    def slide(self, window: Window, caches: Caches, row: int, length: int, count: int) -> None:
        """Let the caches have room for `count` tokens behind the `length` ones of a row: if there
        is none, the tokens that the next ones read move to the first slots, and earlier ones are
        lost.
        """
        old = new = int(self.first_kept[row])
        if length + count - old > window.slots or not length:
            new = window.first_kept(length)
        if new != old:
            kept = slice(new - old, length - old)
            places = [(part_of(row, axis, kept), buffer) for axis, buffer in caches if length]
            content = [buffer.array[place].copy() for place, buffer in places]
            self.pending = Move(row, new, [0] * len(content), content)
            self.settle(caches)

    def settle(self, caches: Caches) -> None:
        """Complete a move and clear the slots behind it. An interrupted call can be repeated."""
        if self.pending is not None:
            row, first_kept, _, content = self.pending
            write(caches, [self.pending])
            for (axis, buffer), moved in zip(caches, content, strict=False):
                buffer.clear_slots(row, axis, slice(moved.shape[axis - 1], None))
            self.first_kept[row], self.pending = first_kept, None

    def resized(self, rows: int) -> "Windows":
        """Return a copy for another number of rows."""
        first_kept = np.zeros(rows, np.int64)
        first_kept[: len(self.first_kept)] = self.first_kept[:rows]
        return Windows(first_kept)


def write(caches: Caches, moves: Iterable[Move]) -> None:
    """Write tokens to their slots. An interrupted call can be repeated."""
    for row, _, first_slots, content in moves:
        for (axis, buffer), slot, moved in zip(caches, first_slots, content, strict=False):
            slots = slice(slot, slot + moved.shape[axis - 1])
            buffer.array[part_of(row, axis, slots)] = moved
