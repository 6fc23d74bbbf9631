"""Positions added to queries and keys but not to values (Press et al. 2020, Shortformer,
Position-Infused Attention; here after the projections).
"""

from typing import Literal, Mapping, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared import sinusoids
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Rows, Table


class Infused(PositionEncoding):
    """scores (q_i + p_i) . (k_j + p_j) / sqrt(D), with the same p of size D for all heads; values
    get no positions.

    Sinusoids are p_n = [sin(n w_k), cos(n w_k)], interleaved, w_k = base^(-2k/D). Shortformer adds
    sinusoids of the model's width before the projections, which amounts to W p instead of p, with
    different W for the queries and the keys of each head.

    Args:
        geometry: head size D, even for sinusoids.
        table: "sinusoidal" or "trained".
        base: ratio of the longest wavelength to 2 pi.

    Weights:
        table.weight: p, [max_positions,D], if table is "trained".
    """

    above = {"base": 1}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        added = self.rows(positions).unsqueeze(2)
        return (q + added).to(q.dtype), (k + added).to(k.dtype)

    def __init__(
        self,
        geometry: Geometry,
        table: Literal["sinusoidal", "trained"] = "sinusoidal",
        base: float = 10000.0,
    ) -> None:
        super().__init__()
        size = geometry.head_size
        if table == "sinusoidal":
            self.check_multiple("head size", size, 2, "choose another head size or table=trained")
        self.base = float(base)
        self.table: Optional[torch.nn.Embedding] = None
        count = geometry.max_positions
        if table == "trained":
            self.table = torch.nn.Embedding(count, size)
            torch.nn.init.normal_(self.table.weight, std=0.02)  # as BERT and GPT-2
            count = 1  # unused, because torch.export writes no empty table
        angles = np.arange(count)[:, None] * sinusoids.frequencies(size, self.base)
        self.waves = Table(sinusoids.rows(angles))

    def rows(self, positions: Tensor) -> Tensor:
        """positions [B,S] int64 (-1 is read as 0) to p [B,S,D]."""
        if self.table is not None:
            return self.table(positions.clamp(min=0))
        return self.waves(positions)


class InfusedOracle(Oracle, of=Infused):
    def tables(self) -> Mapping[str, Rows]:
        e = self.encoding
        return {"waves": sinusoids.formula(e.waves.rows.size(1), e.base)}

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        trained = self.weights.get("table.weight")
        if trained is None:
            return x + sinusoids.row(position, len(x), self.encoding.base)
        return x + trained[position]
