"""Which keys a query attends to. Attributes `before`, `after` and `chunk` define the mask; `exact` states the rule for one query and key."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Causal:
    """All keys up to and including that of the query."""

    before = -1  # number of positions before the query, or after it in `after`; -1 for all
    after = 0
    chunk = 0

    def exact(self, query: int, key: int) -> bool:
        """Return whether the query at position `query` attends to the key at position `key`."""
        return key <= query


@dataclass(frozen=True)
class Window:
    """The keys of the `size` last positions, including that of the query (Child et al. 2019; Mistral, Gemma 2).

    Args:
        size: number of positions.

    Raises:
        ValueError: a size below 1.
    """

    size: int
    after = 0
    chunk = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"sees window: expected size to be at least 1 key, got {self.size}")

    @property
    def before(self) -> int:
        return self.size - 1

    def exact(self, query: int, key: int) -> bool:
        """Return whether the query at position `query` attends to the key at position `key`."""
        return 0 <= query - key < self.size


@dataclass(frozen=True)
class Chunk:
    """The keys up to and including that of the query, in the query's chunk of positions (Llama 4).

    Args:
        size: number of positions in a chunk.

    Raises:
        ValueError: a size below 1.
    """

    size: int
    before = -1
    after = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"sees chunk: expected size to be at least 1 position, got {self.size}")

    @property
    def chunk(self) -> int:
        return self.size

    def exact(self, query: int, key: int) -> bool:
        """Return whether the query at position `query` attends to the key at position `key`."""
        return query - query % self.size <= key <= query


@dataclass(frozen=True)
class Both:
    """All keys of the call (Devlin et al. 2018, BERT)."""

    before = -1
    after = -1
    chunk = 0

    def exact(self, query: int, key: int) -> bool:
        """Return whether the query at position `query` attends to the key at position `key`."""
        return True


@dataclass(frozen=True)
class Near:
    """Keys at most `reach` positions away on either side (Beltagy et al. 2020, Longformer; ModernBERT).

    Args:
        reach: number of positions on either side.

    Raises:
        ValueError: a reach below 0.
    """

    reach: int
    chunk = 0

    def __post_init__(self) -> None:
        if self.reach < 0:
            raise ValueError(f"sees near: expected reach to be at least 0 positions, got {self.reach}")

    @property
    def before(self) -> int:
        return self.reach

    @property
    def after(self) -> int:
        return self.reach

    def exact(self, query: int, key: int) -> bool:
        """Return whether the query at position `query` attends to the key at position `key`."""
        return abs(query - key) <= self.reach


@dataclass(frozen=True)
class EncoderTokens:
    """All tokens of the encoder's sequence (Vaswani et al. 2017, 3.2.3, encoder-decoder attention)."""

    before = -1
    after = -1
    chunk = 0

    def exact(self, query: int, key: int) -> bool:
        """Return whether the query at position `query` attends to the key at position `key`."""
        return True
