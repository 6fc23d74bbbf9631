"""Hierarchical decomposition of a position table: n rows serve n^2 positions (Su 2020)."""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.shared.refusal import refusal


class Hierarchical(PositionEncoding):
    """x + a u_i + (1 - a) u_j at position i n + j, u_i = (p_i - a p_0) / (1 - a), from n trained
    rows p_0 .. p_(n-1).

    Positions below n get exactly their trained rows. Positions, i and j count from 0; the source
    counts them from 1.

    Range: 0 .. max_positions - 1, at most n^2.

    Args:
        geometry: width E, max_positions.
        rows: n; 0 for the smallest n with n^2 of at least max_positions.
        share: a, between 0 and 1, not 0.5: at 0.5 positions (i, j) and (j, i) would be the same.
    """

    least = {"rows": 0}
    most = {"rows": 1 << 20}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        table = self.table.to(torch.float32)
        rows = (table - self.share * table[:1]) / (1 - self.share)
        p = positions.clamp(min=0)
        upper = torch.nn.functional.embedding(torch.div(p, self.rows, rounding_mode="floor"), rows)
        lower = torch.nn.functional.embedding(torch.remainder(p, self.rows), rows)
        return x + (self.share * upper + (1 - self.share) * lower).to(x.dtype)

    def edges(self) -> dict[str, int]:
        return {f"{self.rows} rows": self.rows}

    def row_rules(self) -> list[str]:
        return [f"max(q, 0) // {self.rows}", f"max(q, 0) % {self.rows}"]

    def __init__(self, geometry: Geometry, rows: int = 0, share: float = 0.4) -> None:
        super().__init__()
        self.rows = rows or math.isqrt(geometry.max_positions - 1) + 1
        if self.rows**2 < geometry.max_positions:
            rule = f"rows whose square is at least max_positions {geometry.max_positions}"
            raise refusal("hierarchical", rule, rows, "set rows=N or leave it out")
        if not 0 < share < 1 or share == 0.5:
            remedy = "the author uses 0.4"
            raise refusal("hierarchical", "share between 0 and 1 and not 0.5", share, remedy)
        self.share = float(share)
        self.table = torch.nn.Parameter(torch.randn(self.rows, geometry.width))


class HierarchicalOracle(Oracle, of=Hierarchical):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        p, a = self.weights["table"], self.encoding.share
        i, j = divmod(position, len(p))
        u_i, u_j = ((p[row] - a * p[0]) / (1 - a) for row in (i, j))
        return x + a * u_i + (1 - a) * u_j
