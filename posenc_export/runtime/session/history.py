"""Histories for rewinding states that each call replaces, such as a recurrent vector or a sum.

A rewind restores the last snapshot before the target and replays the tokens in between.
"""

from dataclasses import dataclass, field, replace
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

SPACING = 16  # steps between two snapshots; a rewind replays fewer tokens than this
# Tokens [count,*] of one call, and their coordinates by graph input, [A,count] int64 each.
Part = Tuple[np.ndarray, Dict[str, np.ndarray]]


@dataclass
class Snapshot:
    """The states of a row at one length, and the tokens fed after it."""

    length: int  # number of tokens of the row
    states: Sequence[np.ndarray]  # values of this row in the states that calls replace
    parts: List[Part] = field(default_factory=list)  # tokens fed since, one entry per call

    @property
    def end(self) -> int:
        """Number of tokens of the row after the last part."""
        return self.length + sum(len(tokens) for tokens, _ in self.parts)

    def first(self, count: int) -> Part:
        """Return the first `count` tokens fed after the snapshot, and their attributes."""
        if not count:
            return np.zeros(0, np.int64), {}
        tokens = np.concatenate([tokens for tokens, _ in self.parts])
        attributes = {}
        for name in self.parts[0][1]:
            numbers = [part[name] for _, part in self.parts]
            attributes[name] = np.concatenate(numbers, axis=1)[:, :count]
        return tokens[:count], attributes


class RowHistory:
    """Snapshots of one row, oldest first, with every token fed since the first one. Those before
    the last `limit` tokens, which can be taken back, are dropped.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.snapshots: List[Snapshot] = []

    def needs_snapshot(self, length: int, count: int) -> bool:
        """Whether `record` of `count` tokens needs the states before them. What was recorded past
        `length`, before a rewind or by a call that raised, is dropped.
        """
        self._cut(length)
        if not self.snapshots or count > 1:
            return True
        return length - self.snapshots[-1].length >= SPACING

    def record(self, length: int, states: Optional[Sequence[np.ndarray]], part: Part) -> None:
        """Record tokens that are about to be fed to a row; states are those before, if needed."""
        part = part[0].copy(), {name: numbers.copy() for name, numbers in part[1].items()}
        if states is None:
            self.snapshots[-1].parts.append(part)
            return
        self.snapshots.append(Snapshot(length, states, [part]))
        while len(self.snapshots) > 1 and length - self.snapshots[1].length >= self.limit:
            self.snapshots.pop(0)

    def reach(self, length: int) -> int:
        """Return the smallest length that a row of `length` tokens can be rewound to."""
        return self.snapshots[0].length if self.snapshots else length

    def back_to(self, target: int) -> Tuple[Snapshot, Part]:
        """Return the last snapshot at or before `target`, and the tokens to replay from there."""
        snapshot = [snapshot for snapshot in self.snapshots if snapshot.length <= target][-1]
        return snapshot, snapshot.first(target - snapshot.length)

    def _cut(self, length: int) -> None:
        while self.snapshots and self.snapshots[-1].length > length:
            self.snapshots.pop()
        if self.snapshots and self.snapshots[-1].end > length:
            snapshot, count = self.snapshots[-1], length - self.snapshots[-1].length
            snapshot.parts = [snapshot.first(count)] if count else []

    def copy(self) -> "RowHistory":
        """Return an independent copy, for a fork."""
        other = RowHistory(self.limit)
        other.snapshots = [replace(kept, parts=list(kept.parts)) for kept in self.snapshots]
        return other
