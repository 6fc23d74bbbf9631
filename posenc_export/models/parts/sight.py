"""What a query sees of the keys: reach on either side, and chunks. Plain numbers that a mask is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Causal:
    """All keys up to the query."""

    before = -1  # keys on that side: a number of positions, -1 for all of them
    after = 0
    chunk = 0

    def exact(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        return key <= query


@dataclass(frozen=True)
class Window:
    """The query's own key and the size - 1 before it (Child et al. 2019; Mistral, Gemma 2).

    Args:
        size: keys that a query sees.

    Raises:
        ValueError: a size below 1.
    """

    size: int
    after = 0
    chunk = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"sees window: size is at least 1 key, got {self.size}")

    @property
    def before(self) -> int:
        return self.size - 1

    def exact(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        return 0 <= query - key < self.size


@dataclass(frozen=True)
class Chunk:
    """The keys up to the query in its own chunk of positions (Llama 4).

    Args:
        size: positions in a chunk.

    Raises:
        ValueError: a size below 1.
    """

    size: int
    before = -1
    after = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"sees chunk: size is at least 1 position, got {self.size}")

    @property
    def chunk(self) -> int:
        return self.size

    def exact(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        return query - query % self.size <= key <= query


@dataclass(frozen=True)
class Both:
    """All keys of the call (Devlin et al. 2018, BERT)."""

    before = -1
    after = -1
    chunk = 0

    def exact(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        return True


@dataclass(frozen=True)
class Near:
    """Keys at most `reach` positions away on either side (Beltagy et al. 2020, Longformer; ModernBERT).

    Args:
        reach: positions.

    Raises:
        ValueError: a reach below 0.
    """

    reach: int
    chunk = 0

    def __post_init__(self) -> None:
        if self.reach < 0:
            raise ValueError(f"sees near: reach is at least 0 positions, got {self.reach}")

    @property
    def before(self) -> int:
        return self.reach

    @property
    def after(self) -> int:
        return self.reach

    def exact(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        return abs(query - key) <= self.reach


@dataclass(frozen=True)
class OfEncoder:
    """All tokens of another sequence, which an encoder has read (Vaswani et al. 2017, 3.2.3, encoder-decoder attention)."""

    before = -1
    after = -1
    chunk = 0

    def exact(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        return True
