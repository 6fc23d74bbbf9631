"""A model of a session's rows, independent of the session: the tokens of each row, and how far
it can be rewound.
"""

import copy
from dataclasses import dataclass, field

from tests.fuzz.subjects import Token


@dataclass
class Reading:
    """A row of a session.

    Args:
        start: position of the first token.
        limit: number of tokens that can be taken back at least, if states are replaced by each
            call.
        tokens: tokens that the row has read.
        furthest: largest length that the row has had.
        source: index of its encoder sequence in Subject.encoded.
    """

    start: int
    limit: int
    tokens: list[Token] = field(default_factory=list)
    furthest: int = 0
    source: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def remembers(self, n: int) -> bool:
        """Whether the session guarantees a rewind by n tokens: to a length within `limit` of the
        largest length the row has had.
        """
        return self.furthest - (self.length - n) <= self.limit

    def read(self, tokens: list[Token]) -> None:
        """Add tokens."""
        self.tokens += tokens
        self.furthest = max(self.furthest, self.length)

    def back(self, n: int) -> None:
        """Remove the last n tokens."""
        self.tokens = self.tokens[: self.length - n]

    def copy(self) -> "Reading":
        """Return an independent copy, for a fork."""
        return copy.deepcopy(self)
