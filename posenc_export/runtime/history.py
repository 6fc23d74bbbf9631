"""What a rewind needs where states are replaced by each call: their values at a few lengths, and the tokens fed since.

A state that a call replaces (a recurrent vector, a sum) cannot be cut back. It is restored from the last mark before the target and fed the tokens in between.
"""

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

SPACING = 16  # steps from one mark to the next: a rewind feeds fewer tokens than that again
Numbers = Dict[str, np.ndarray]  # what stands beside the tokens of one row, by graph input: [n,count]


Part = Tuple[np.ndarray, Numbers]  # tokens [count,*] of a call and what stands beside them


@dataclass
class Mark:
    """The states of a row at a length, and what was fed behind it.

    Args:
        length: tokens of the row.
        states: values of the states that calls replace, of this row alone.
        parts: one for each call.
    """

    length: int
    states: Sequence[np.ndarray]
    parts: List[Part] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Length behind the last token."""
        return self.length + sum(len(tokens) for tokens, _ in self.parts)

    def first(self, count: int) -> Part:
        """The first `count` tokens, and what stands beside them."""
        if not count:
            return np.zeros(0, np.int64), {}
        tokens, numbers = np.concatenate([tokens for tokens, _ in self.parts]), [numbers for _, numbers in self.parts]
        return tokens[:count], {name: np.concatenate([part[name] for part in numbers], axis=1)[:, :count] for name in numbers[0]}


class RowHistory:
    """Marks of one row, oldest first, without a gap from the first mark to the last token.

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
        part = (tokens.copy(), {name: numbers[name].copy() for name in numbers})
        if states is None:
            self.marks[-1].parts.append(part)
            return
        self.marks.append(Mark(length, states, [part]))
        while len(self.marks) > 1 and length - self.marks[1].length >= self.limit:
            self.marks.pop(0)

    def reach(self, length: int) -> int:
        """The least length that a row of `length` tokens can be taken back to."""
        return self.marks[0].length if self.marks else length

    def back_to(self, target: int) -> Tuple[Mark, Part]:
        """The last mark at or before `target`, and the tokens that lead from it to `target`."""
        mark = next(mark for mark in reversed(self.marks) if mark.length <= target)
        return mark, mark.first(target - mark.length)

    def cut(self, length: int) -> None:
        """Forget what was recorded behind `length`, of a rewind or of a call that broke off."""
        while self.marks and self.marks[-1].length > length:
            self.marks.pop()
        if self.marks and self.marks[-1].end > length:
            mark = self.marks[-1]
            mark.parts = [mark.first(length - mark.length)] if length > mark.length else []

    def copy(self) -> "RowHistory":
        """The same past, for a fork."""
        other = RowHistory(self.limit)
        other.marks = [Mark(mark.length, mark.states, list(mark.parts)) for mark in self.marks]
        return other
