"""A model of a session's rows, independent of the session: the tokens of each row, and how far
it can be rewound.
"""

import copy
from dataclasses import dataclass, field
from typing import List

from tests.fuzz.subjects import Token

SPACING = 16  # steps between two snapshots of a row, if states are replaced by each call


@dataclass
class Reading:
    """A row of a session.

    Args:
        start: position of the first token.
        limit: number of tokens that can be taken back at least, if states are replaced by each
            call.
        tokens: tokens that the row has read.
        marks: lengths at which the session has snapshots of the row's states.
        furthest: largest length that the row has had.
        source: index of its encoder sequence in Subject.encoded.
    """

    start: int
    limit: int
    tokens: List[Token] = field(default_factory=list)
    marks: List[int] = field(default_factory=list)
    furthest: int = 0
    source: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def reach(self) -> int:
        """The smallest length that the row can be rewound to."""
        return self.marks[0] if self.marks else self.length

    def remembers(self, n: int) -> bool:
        """Whether the session guarantees a rewind by n tokens: to a length within `limit` of the
        largest length the row has had.
        """
        return self.furthest - (self.length - n) <= self.limit

    def read(self, tokens: List[Token], chunk: int) -> None:
        """Add tokens in chunks. A snapshot is taken before every chunk of several tokens, and
        before a single token after SPACING of them.
        """
        for begin in range(0, len(tokens), chunk):
            part = tokens[begin : begin + chunk]
            if not self.marks or len(part) > 1 or self.length - self.marks[-1] >= SPACING:
                self._keep()
            self.tokens += part
        self.furthest = max(self.furthest, self.length)

    def back(self, n: int) -> None:
        """Remove the last n tokens, and the snapshots after them."""
        if not n:
            return
        self.tokens = self.tokens[: self.length - n]
        self.marks = [mark for mark in self.marks if mark <= self.length]

    def _keep(self) -> None:
        self.marks.append(self.length)
        while len(self.marks) > 1 and self.length - self.marks[1] >= self.limit:
            self.marks.pop(0)

    def copy(self) -> "Reading":
        """Return an independent copy, for a fork."""
        return copy.deepcopy(self)
