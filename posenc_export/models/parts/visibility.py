"""Visibility of keys: which keys a query attends to."""

from posenc_export.shared.places import seen


class Visibility:
    """A rule for the keys of a query.

    Attributes:
        before, after: number of positions before and after that of the query; -1 for all.
        chunk: number of positions in a chunk, outside of which no key is visible; 0 for no chunks.
    """

    before, after, chunk = -1, 0, 0

    def __init__(self) -> None:
        """A rule without parameters."""

    @property
    def rule(self) -> str:
        """Whether a query at position q sees a key at k, as a rule of shared/places.py."""
        return seen(self.before, self.after, self.chunk)

    def edges(self) -> dict[str, int]:
        """Distances and positions where keys become invisible; exports compare both sides."""
        limits = {"window": self.before + 1, "chunk": self.chunk}
        return {f"{name} {limit}": limit for name, limit in limits.items() if limit}


class Causal(Visibility):
    """All keys up to and including that of the query."""


class Window(Visibility):
    """The keys of the `size` last positions, including that of the query (Child et al. 2019;
    Mistral, Gemma 2).
    """

    least = {"size": 1}

    def __init__(self, size: int) -> None:
        self.before = size - 1


class Chunk(Visibility):
    """The keys up to that of the query in its chunk of `size` positions (Llama 4)."""

    least = {"size": 1}

    def __init__(self, size: int) -> None:
        self.chunk = size


class Bidirectional(Visibility):
    """All keys of the call (Devlin et al. 2018, BERT)."""

    after = -1


class BidirectionalWindow(Visibility):
    """Keys at most `reach` positions away on either side (Beltagy et al. 2020, Longformer;
    ModernBERT).
    """

    least = {"reach": 0}

    def __init__(self, reach: int) -> None:
        self.before = self.after = reach
