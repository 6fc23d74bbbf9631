"""What a rewind needs where states are replaced by each call: their values at a few lengths, and the tokens fed since.

A state that a call replaces (a recurrent vector, a sum) cannot be cut back. It is restored from the last mark before the target and fed the tokens in between.
"""

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

SPACING = 16  # steps from one mark to the next: a rewind feeds fewer tokens than that again
Numbers = Dict[str, np.ndarray]  # what stands beside the tokens of one row, by graph input: [n,count]


@dataclass
class Mark:
    """The states of a row at a length, and what was fed behind it.

    Args:
        length: tokens of the row.
        states: values of the states that calls replace, of this row alone.
        tokens: [count,*], one array for each call.
        numbers: what stands beside them, one for each call.
    """

    length: int
    states: Sequence[np.ndarray]
    tokens: List[np.ndarray] = field(default_factory=list)
    numbers: List[Numbers] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Length behind the last token."""
        return self.length + sum(len(part) for part in self.tokens)


class RowHistory:
    """Marks of one row, oldest first.

    Args:
        limit: tokens that can be taken back; older marks are dropped, so that memory does not grow with the sequence.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.marks: List[Mark] = []

    def wants_mark(self, count: int) -> bool:
        """Whether `record` of `count` tokens needs the states before them."""
        return not self.marks or count > 1 or self.marks[-1].end - self.marks[-1].length >= SPACING

    def record(self, length: int, states: Optional[Sequence[np.ndarray]], tokens: np.ndarray, numbers: Numbers) -> None:
        """Remember tokens [count,*] that are about to be fed behind `length`; states where `wants_mark`."""
        if states is not None:
            if self.marks and self.marks[-1].length == length:
                self.marks.pop()
            self.marks.append(Mark(length, states))
            while len(self.marks) > 1 and length - self.marks[1].length >= self.limit:
                self.marks.pop(0)
        self.marks[-1].tokens.append(tokens.copy())
        self.marks[-1].numbers.append({name: part.copy() for name, part in numbers.items()})

    def reach(self, length: int) -> int:
        """The least length that a row of `length` tokens can be taken back to."""
        return self.marks[0].length if self.marks else length

    def cut(self, length: int) -> None:
        """Forget what was recorded behind `length`: a call that did not come to its end."""
        while self.marks and self.marks[-1].length > length:
            self.marks.pop()
        if self.marks and self.marks[-1].end > length:
            mark = self.marks[-1]
            tokens, numbers = _joined(mark, length - mark.length)
            mark.tokens, mark.numbers = [tokens], [numbers]

    def back_to(self, target: int) -> Tuple[Mark, np.ndarray, Numbers]:
        """The last mark at or before `target`, taken out, and the tokens and numbers that lead from it to `target`."""
        while self.marks[-1].length > target:
            self.marks.pop()
        mark = self.marks.pop()
        return (mark, *_joined(mark, target - mark.length))

    def copy(self) -> "RowHistory":
        """The same past, for a fork."""
        other = RowHistory(self.limit)
        other.marks = [Mark(mark.length, mark.states, list(mark.tokens), list(mark.numbers)) for mark in self.marks]
        return other


def _joined(mark: Mark, count: int) -> Tuple[np.ndarray, Numbers]:
    """The first `count` tokens behind a mark, and what stands beside them."""
    if not mark.tokens:
        return np.zeros(0, np.int64), {}
    names = mark.numbers[0]
    return np.concatenate(mark.tokens)[:count], {name: np.concatenate([part[name] for part in mark.numbers], axis=1)[:, :count] for name in names}
