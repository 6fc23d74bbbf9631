"""Dual chunk attention: rotary distances within a trained length (An et al. 2024, Training-Free
Long-Context Scaling of Large Language Models, 3.2; as in Qwen2.5-1M).
"""

import math
from typing import Any, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Seen
from posenc_export.encodings.shared.oracles import Rows
from posenc_export.encodings.shared.rotary import Layout, Rotation, RotationOracle
from posenc_export.shared.refusal import refusal


class DualChunk(Rotation):
    """RoPE in which a key j is min(i - j, c - (j mod s)) tokens before the query i, with chunks of
    s = chunk_size - local_size tokens and c = chunk_size.

    Keys are rotated by j mod s. A query is rotated by i mod s for keys of its own chunk, by min(s +
    (i mod s), c) for those of the chunk before it, and by c for earlier ones, as in the authors'
    code and vLLM; the paper has c - 1 for c. Sequences of up to s tokens have the scores of RoPE.
    Memory besides the scores: two tensors [B,H,S,T].

    Beyond a trained length L, scores of query i are multiplied by (0.1 ln((i + 1) / L) + 1)^2
    (Qwen2.5-1M Technical Report, 2025). In a prompt, vLLM uses its length in place of i + 1 for all
    queries, which differs for all but the last one.

    Args:
        geometry: head size D; max_positions.
        theta, layout: see RoPE.
        chunk_size: largest distance in tokens, above 2 local_size, c in the paper.
        local_size: nearest tokens, whose distances are always exact, w in the paper.
        original_max_positions: L; 0 for scores that are not multiplied.
    """

    works_in = ("causal",)
    least = {"chunk_size": 1, "local_size": 0, "original_max_positions": 0}
    most = {"chunk_size": 1 << 22}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate by places in chunks; shapes as in PositionEncoding."""
        if self.grows:
            q = (q * self.factors(positions).unsqueeze(3)).to(q.dtype)
        places = torch.remainder(positions, self.period)
        return ops.rotate_both(
            q, k, places, self.cos.rows, self.sin.rows, self.interleaved, linear=False
        )

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding; queries are turned further for keys of other chunks."""
        places = torch.remainder(seen.positions, self.period)
        single, rest = q.to(torch.float32), self.limit - places
        near = self.turned(single, rest.clamp(max=self.period)) - single
        far = self.turned(single, rest) - single
        # The start of the query's chunk, [B,1,S,1].
        start = (seen.positions - places).unsqueeze(1).unsqueeze(3)
        keys_at = seen.key_positions.unsqueeze(1).unsqueeze(2)
        added = torch.where(
            keys_at.lt(start - self.period),
            ops.products(far, seen.keys),
            ops.products(near, seen.keys),
        )
        added = torch.where(keys_at.lt(start), added, torch.zeros_like(added))
        return ops.attend(q, seen.keys, seen.values, seen.mask, scale * added, scale)

    def edges(self) -> dict[str, int]:
        starts = {"second chunk": self.period, "third chunk": 2 * self.period}
        return {**starts, "end of the local window": self.limit + 1, "L": self.trained}

    def row_rules(self) -> list[str]:
        place = f"q % {self.period}"
        before = f"{self.limit} - {place}"
        return [
            place,
            f"min({before}, {self.period})",
            before,
            "max(q, 0)",
            f"k < q - {place}",
            f"k < q - {place} - {self.period}",
        ]

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10000.0,
        chunk_size: int = 128,
        local_size: int = 32,
        original_max_positions: int = 0,
        layout: Layout = "half",
    ) -> None:
        super().__init__(geometry, layout)
        if chunk_size <= 2 * local_size:
            rule, got = "chunk_size above 2 local_size", f"{chunk_size} and {local_size}"
            raise refusal("dual_chunk", rule, got, "choose a smaller local_size")
        self.theta, self.trained = float(theta), original_max_positions
        self.period, self.limit = chunk_size - local_size, chunk_size
        self.count = self.limit + 1  # rows of the tables
        self.tabulate()
        self.grows = 0 < self.trained < geometry.max_positions
        self.factors = self.filled("factors", geometry.max_positions if self.grows else 1)

    def formulas(self) -> Mapping[str, Rows]:
        def factors(positions: np.ndarray) -> np.ndarray:
            grown = (positions + 1) / self.trained if self.grows else np.ones_like(positions)
            return np.asarray((0.1 * np.log(np.maximum(grown, 1.0)) + 1) ** 2)

        return {**super().formulas(), "factors": factors}

    def turned(self, q: Tensor, places: Tensor) -> Tensor:
        """Rotate q [B,S,H,D] by places [B,S] int64."""
        return ops.rotate_pairs(
            q, places, self.cos.rows, self.sin.rows, self.interleaved, linear=False
        )


class DualChunkOracle(RotationOracle, of=DualChunk):
    def factor(self, position: float) -> float:
        e = self.encoding
        if not e.grows or position < e.trained:
            return 1.0
        return (1 + math.log((position + 1) / e.trained) / 10) ** 2

    def rotate(self, x: np.ndarray, position: Any) -> np.ndarray:
        return self.factor(position) * self.rotate_key(x, position)

    def rotate_key(self, x: np.ndarray, position: Any) -> np.ndarray:
        return super().rotate(x, position % self.encoding.period)

    def scores(
        self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        e, scores = self.encoding, []
        upright = super().rotate(q, -(query % e.period))
        for key, p in zip(keys, positions, strict=True):
            distance = min(query - p, e.limit - p % e.period)
            scores.append(super().rotate(upright, distance + p % e.period) @ key)
        return np.array(scores) / math.sqrt(len(q))
