"""Oracles: what encodings are compared with, in float64, one entry at a time."""

import math
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from posenc_export.shared.refusal import refusal

Rows = Callable[[np.ndarray], np.ndarray]


class Weights(dict[str, np.ndarray]):
    """Trained numbers of an encoding by name, float64.

    Args:
        encoding: encoding that has them, or None for none.

    Raises:
        ValueError: a name that is not that of a trained number is read.
    """

    def __init__(self, encoding: Any) -> None:
        super().__init__()
        self.cls, self.fixed = type(encoding).__name__, []
        if encoding is not None:
            self.fixed = [name for name, _ in encoding.named_buffers()]
            for name, value in encoding.named_parameters():
                self[name] = value.detach().double().numpy()

    def __missing__(self, name: str) -> np.ndarray:
        read, remedy = repr(name), "read one of these, or an attribute of self.encoding"
        if name in self.fixed:
            read = f"{name}, a buffer"
            remedy = "keep fixed numbers in a Table and trained ones in an Exact"
        rule = f"the name of a trained number ({', '.join(self) or 'it has none'})"
        raise refusal(f"encoding {self.cls}", f"its oracle to read {rule}", read, remedy)


class Oracle:
    """An independent float64 implementation of the formula, one entry at a time. Each method is the
    identity unless overridden.

    `class XOracle(Oracle, of=X)` makes a subclass the oracle of the encoding X.

    Args:
        encoding: the encoding that the oracle judges; an oracle reads its parameters, and its
            trained numbers from `weights`, by name, in float64.
    """

    encoding: Any = None  # also of a subclass whose constructor does not call this one's

    def __init_subclass__(cls, of: Any = None) -> None:
        super().__init_subclass__()
        if of is not None:
            of.oracle_class = cls

    def __init__(self, encoding: Any = None) -> None:
        self.encoding = encoding
        self.weights: dict[str, np.ndarray] = Weights(encoding)

    def overrides(self, *names: str) -> bool:
        """Return whether the class overrides one of these methods."""
        return any(getattr(type(self), name) is not getattr(Oracle, name) for name in names)

    def tables(self) -> Mapping[str, Rows]:
        """State tables of positions, as `formulas` of the encoding, by default these."""
        return {} if self.encoding is None else dict(self.encoding.formulas())

    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        """Encode one token x [E], float64."""
        return x

    def embed_rows(self, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        """Encode x [n,E], a row from its first token on, for tokens that read earlier ones."""
        return np.stack([self.embed(row.copy(), p) for row, p in zip(x, positions, strict=True)])

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotate a query head x [D], float64, and a key head, unless `rotate_key` does."""
        return x

    def rotate_key(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotate one key head x [D], float64."""
        return self.rotate(x, position)

    def rotate_heads(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotate all query heads of a token, x [H,D], where heads differ."""
        return np.stack([self.rotate(head, position) for head in x])

    def rotate_key_heads(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotate all key heads of a token, x [K,D]."""
        return np.stack([self.rotate_key(head, position) for head in x])

    def observe(self, x: np.ndarray, first: int = 0) -> None:
        """Keep x [n,E], the attention's input from position first on."""
        self.x, self.first = x, first

    def score_scale(self, head_size: int) -> float:
        """Factor on the products q k."""
        return 1 / math.sqrt(head_size)

    def bias(self, head: int, query: int, key: int) -> float:
        """Bias added to the score of one head and one pair of positions."""
        return 0.0

    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        """Term of the score of q [D] and rotated k [D] at positions query and key."""
        return 0.0

    def scores(
        self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        """Scores [n] of q [D] at query against rotated keys [n,D] at positions, in order."""
        scale, scores = self.score_scale(len(q)), []
        for k, p in zip(keys, positions, strict=True):
            added = self.bias(head, query, p) + self.content(head, q, k, query, p)
            scores.append(scale * float(q @ k) + added)
        return np.array(scores)

    def values(
        self, head: int, values: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        """Values [n,D] that a query mixes, given the values [n,D] at positions."""
        return values
