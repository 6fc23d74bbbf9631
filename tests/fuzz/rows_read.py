"""What a session holds, told without it: the tokens of each row, and how far a row can go back."""

import copy
from dataclasses import dataclass, field
from typing import List

from tests.fuzz.subjects import Token

SPACING = 16  # steps between two marks of a row whose states each call replaces


@dataclass
class Reading:
    """A row: where it starts, what it has read, and the lengths at which its states were kept.

    Args:
        limit: tokens that it can be taken back at least, where states are replaced by each call.
    """

    start: int
    limit: int
    tokens: List[Token] = field(default_factory=list)
    marks: List[int] = field(default_factory=list)
    furthest: int = 0
    source: int = 0  # of Subject.encoded

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def reach(self) -> int:
        """The least length it can be taken back to."""
        return self.marks[0] if self.marks else self.length

    def remembers(self, n: int) -> bool:
        """Whether it promises to go back n tokens: to within its limit of the furthest that it ever was."""
        return self.furthest - (self.length - n) <= self.limit

    def read(self, tokens: List[Token], chunk: int) -> None:
        """Tokens in chunks. States are kept in front of each of several tokens, and of one token behind SPACING of them."""
        for begin in range(0, len(tokens), chunk):
            part = tokens[begin : begin + chunk]
            if not self.marks or len(part) > 1 or self.length - self.marks[-1] >= SPACING:
                self._keep()
            self.tokens += part
        self.furthest = max(self.furthest, self.length)

    def back(self, n: int) -> None:
        """Without the last n tokens; from the mark before them on, what is left of them is read again, in one call."""
        if not n:
            return
        self.tokens = self.tokens[: self.length - n]
        self.marks = [mark for mark in self.marks if mark <= self.length]

    def _keep(self) -> None:
        self.marks.append(self.length)
        while len(self.marks) > 1 and self.length - self.marks[1] >= self.limit:
            self.marks.pop(0)

    def copy(self) -> "Reading":
        """The same, for a fork."""
        return copy.deepcopy(self)
