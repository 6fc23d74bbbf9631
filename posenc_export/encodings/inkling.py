"""Trained functions of the distance, weighted by the query's token (the relative logits of
Inkling, Thinking Machines 2026, from the code of transformers; there is no paper).
"""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen


class Inkling(PositionEncoding):
    """scores + w_h(x_i) . c[i - j] if 0 <= i - j < extent, scores alone otherwise; w = W x + b with
    `basis` numbers per head, c trained.

    x is the input of the attention. The added term does not depend on the content of keys, so there
    is no state. Inkling multiplies the scores of long texts, with this term, by a temperature;
    `logn` combined with this encoding multiplies the queries only. Memory besides the scores:
    [B,H,S,extent+1].

    Args:
        geometry: width E, heads H.
        basis: number of curves.
        extent: distance in tokens from which nothing is added.
        scores: "scaled" for q k / sqrt(D), "by_size" for q k / D, as in Inkling, whose queries and
            keys are normalised.

    Weights:
        query.weight, query.bias: W and b, [H*basis,E] and [H*basis], heads outermost; b is 0 in
            Inkling.
        table: the curves c, [basis,extent].
    """

    shared = False
    least = {"basis": 1, "extent": 1}
    most = {"basis": 4096, "extent": 1 << 20}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding; states [weights [B,H,S,basis]]."""
        # A column of zeros for all other distances.
        rows = torch.nn.functional.pad(states[0] @ self.table.to(torch.float32), [0, 1])
        behind = -ops.distances(seen.positions, seen.key_positions)
        inside = behind.ge(0).logical_and(behind.lt(self.extent))
        index = torch.where(inside, behind, float(self.extent)).to(torch.int64)
        return ops.attend(q, seen.keys, seen.values, seen.mask, ops.pick(rows, index), scale)

    def edges(self) -> dict[str, int]:
        return {f"extent {self.extent}": self.extent}

    def row_rules(self) -> list[str]:
        return [f"q - k if 0 <= q - k < {self.extent} else {self.extent}"]

    def __init__(
        self,
        geometry: Geometry,
        basis: int = 16,
        extent: int = 64,
        scores: Literal["scaled", "by_size"] = "scaled",
    ) -> None:
        super().__init__()
        self.heads, self.basis, self.extent, self.scores = geometry.heads, basis, extent, scores
        self.query = torch.nn.Linear(geometry.width, geometry.heads * basis)
        self.table = torch.nn.Parameter(torch.randn(basis, extent) / math.sqrt(basis))

    def observe(
        self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: list[Tensor]
    ) -> list[Tensor]:
        """x [B,S,E] to weights of curves [B,H,S,basis] float32, for `rescore` of this call."""
        weights = self.query(x).view(x.size(0), x.size(1), self.heads, self.basis)
        return [weights.transpose(1, 2).to(torch.float32)]

    def score_scale(self, head_size: int) -> float:
        return 1 / head_size if self.scores == "by_size" else 1 / math.sqrt(head_size)


class InklingOracle(Oracle, of=Inkling):
    def score_scale(self, head_size: int) -> float:
        return float(head_size) ** (-1.0 if self.encoding.scores == "by_size" else -0.5)

    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        weight, offset = self.weights["query.weight"], self.weights["query.bias"]
        curves = self.weights["table"]
        basis, extent = curves.shape
        if not 0 <= query - key < extent:
            return 0.0
        rows = slice(head * basis, (head + 1) * basis)
        of_curves = weight[rows] @ self.x[query - self.first] + offset[rows]
        return float(of_curves @ curves[:, query - key])
