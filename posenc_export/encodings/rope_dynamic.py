"""Dynamic NTK scaling of RoPE: the base grows with the length seen (emozilla 2023, in
transformers as rope_type "dynamic").
"""

import math
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen, Table
from posenc_export.encodings.shared.oracles import Rows
from posenc_export.encodings.shared.rotary import Layout, multiply_pairs, rotary_size
from posenc_export.encodings.shared.tables import wave_tables
from posenc_export.ops import by_query


class RoPEDynamic(PositionEncoding):
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
    above = {"theta": 0}
    least = {"factor": 1, "original_max_positions": 1}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """Rotate with the frequencies up to L; shapes as in PositionEncoding."""
        cos, sin = self.cos.rows, self.sin.rows
        return ops.rotate_both(q, k, positions, cos, sin, self.interleaved)

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: List[Tensor]) -> Tensor:
        """As in PositionEncoding; keys are turned further for queries beyond L."""
        return by_query.attend_turned_keys(
            q,
            seen.keys,
            seen.values,
            seen.mask,
            seen.positions,
            seen.key_positions,
            self.first.rows,
            self.second.rows,
            self.interleaved,
            self.original,
            scale,
        )

    def edges(self) -> Dict[str, int]:
        return {f"original length {self.original}": self.original}

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10000.0,
        factor: float = 2.0,
        original_max_positions: int = 2048,
        layout: Layout = "half",
        rotary: Optional[int] = None,
    ) -> None:
        super().__init__()
        size = rotary_size("rope_dynamic", geometry, rotary, least=4)
        self.theta, self.factor, self.original = float(theta), float(factor), original_max_positions
        self.interleaved, self.size = layout == "interleaved", size
        frequencies = self.frequencies(geometry.max_positions)
        self.cos, self.sin = wave_tables(frequencies[0], geometry.max_positions)
        leading = frequencies.to(torch.float32)
        # Two float32 parts have together 48 significant bits.
        self.first, self.second = Table(leading.numpy()), Table((frequencies - leading).numpy())

    def frequencies(self, count: int) -> Tensor:
        """w_k(n) [count,r/2] float64, n = 1 .. count."""
        shares = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        exponent = self.size / (self.size - 2)
        seen = torch.arange(self.original + 1, max(count, self.original) + 1).double()
        grown = self.factor * seen / self.original - (self.factor - 1)
        bases = self.theta * grown**exponent
        kept = (1.0 / self.theta**shares).expand(min(count, self.original), -1)
        return torch.cat((kept, 1.0 / bases[:, None] ** shares))


class RoPEDynamicOracle(Oracle, of=RoPEDynamic):
    def frequency(self, k: int, seen: int) -> float:
        e, base = self.encoding, self.encoding.theta
        if seen > e.original:
            base *= math.pow(e.factor * seen / e.original - e.factor + 1, e.size / (e.size - 2))
        return math.pow(base, -2 * k / e.size)

    def tables(self) -> Mapping[str, Rows]:
        e = self.encoding
        shares = np.array([2 * k / e.size for k in range(e.size // 2)])

        def frequencies(positions: np.ndarray) -> np.ndarray:
            grown = np.maximum(e.factor * (positions + 1) / e.original - e.factor + 1, 1.0)
            bases = e.theta * grown ** (e.size / (e.size - 2))
            bases = np.where(positions + 1 > e.original, bases, e.theta)
            return bases**-shares

        def angles(positions: np.ndarray) -> np.ndarray:
            steps = frequencies(np.zeros_like(positions))
            return (positions.astype(steps.dtype) * steps).astype(np.float64)

        return {
            "cos": lambda positions: np.cos(angles(positions)),
            "sin": lambda positions: np.sin(angles(positions)),
            "first": frequencies,
        }

    def angles(self, position: int, seen: int) -> np.ndarray:
        e = self.encoding
        frequencies = [self.frequency(k, seen) for k in range(e.size // 2)]
        return position * np.array(frequencies)

    def rotated(self, x: np.ndarray, position: int, seen: int, rotated_for: int = 0) -> np.ndarray:
        """Rotate x [D] for a length; by the difference, if already rotated."""
        angles = self.angles(position, seen)
        if rotated_for:
            angles = angles - self.angles(position, rotated_for)
        return multiply_pairs(x, np.exp(1j * angles), self.encoding.interleaved)

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        return self.rotated(x, position, 1)

    def scores(
        self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        q = self.rotated(q, query, query + 1, rotated_for=1)
        pairs = zip(keys, positions, strict=True)
        keys = np.stack([self.rotated(key, p, query + 1, rotated_for=1) for key, p in pairs])
        return keys @ q / math.sqrt(len(q))
