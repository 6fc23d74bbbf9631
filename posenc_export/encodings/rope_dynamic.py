"""Dynamic NTK scaling of RoPE: the base grows with the length seen (emozilla 2023, in
transformers as rope_type "dynamic").
"""

import math
from typing import Mapping, Sequence

import numpy as np
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Seen, Table
from posenc_export.encodings.shared.oracles import Rows
from posenc_export.encodings.shared.rotary import Layout, Rotation, RotationOracle, multiply_pairs
from posenc_export.ops import by_query


class RoPEDynamic(Rotation):
    """A query that has seen n = i + 1 tokens, and all keys it attends to, are rotated with w_k(n) =
    theta_n^(-2k/r); theta_n = theta (factor n / L - factor + 1)^(r/(r-2)) if n > L, else theta.

    Keys are cached rotated with w_k(L), and a query beyond L rotates them further. Results do not
    depend on how a sequence is cut into calls. Memory besides the scores: the keys rotated for each
    query, [B,S,K,T,D], so prompts are read in small chunks.

    Args:
        geometry: head size D, heads.
        theta: base up to the original length.
        factor: factor by which the range may be extended.
        original_max_positions: L, tokens the model was trained on.
        layout, rotary: see RoPE; rotary is at least 4, because the exponent is undefined at 2.
    """

    chunk = 8
    least = {"factor": 1, "original_max_positions": 1}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate with the frequencies up to L; shapes as in PositionEncoding."""
        cos, sin = self.cos.rows, self.sin.rows
        return ops.rotate_both(q, k, positions, cos, sin, self.interleaved)

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding; keys are turned further for queries beyond L."""
        keys, values, mask, places, keys_at = seen
        first, second, turns = self.first.rows, self.second.rows, self.interleaved
        return by_query.attend_turned_keys(
            q, keys, values, mask, places, keys_at, first, second, turns, self.original, scale
        )

    def formulas(self) -> Mapping[str, Rows]:
        return {**super().formulas(), "first": self.frequencies}

    def edges(self) -> dict[str, int]:
        return {f"original length {self.original}": self.original}

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10000.0,
        factor: float = 2.0,
        original_max_positions: int = 2048,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        super().__init__(geometry, layout, rotary, least=4)
        self.theta, self.factor, self.original = float(theta), float(factor), original_max_positions
        self.tabulate()
        frequencies = self.frequencies(np.arange(geometry.max_positions)[:, None])
        leading = frequencies.astype(np.float32)
        # Two float32 parts have together 48 significant bits.
        self.first, self.second = Table(leading), Table(frequencies - leading)

    def frequencies(self, positions: np.ndarray) -> np.ndarray:
        """w_k(n) [n,r/2] float64 of queries at positions [n,1]."""
        grown = self.factor * (positions + 1) / self.original - (self.factor - 1)
        bases = self.theta * np.maximum(grown, 1.0) ** (self.size / (self.size - 2))
        return np.asarray(bases ** (-np.arange(0, self.size, 2) / self.size))


class RoPEDynamicOracle(RotationOracle, of=RoPEDynamic):
    def further(self, x: np.ndarray, position: int, query: int) -> np.ndarray:
        """Rotate x [D] for a query, after its rotation up to L."""
        (drift,) = np.diff(self.encoding.frequencies(np.array([[0], [query]])), axis=0)
        return multiply_pairs(x, np.exp(1j * position * drift), self.encoding.interleaved)

    def scores(
        self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        q = self.further(q, query, query)
        pairs = zip(keys, positions, strict=True)
        keys = np.stack([self.further(key, p, query) for key, p in pairs])
        return keys @ q / math.sqrt(len(q))
