"""Multiplicative positions (Dufter et al. 2021, Position Information in Transformers, 3.1)."""

from typing import Literal, Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared import sinusoids
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Rows


class Multiplicative(PositionEncoding):
    """x * P[p], P trained, or the interleaved sinusoid sin(p w_k), cos(p w_k), w_k = 10000^(-2k/E).

    Args:
        geometry: width E, max_positions.
        table: "learned" (initialised around 1) or, for an even width, "sinusoidal".
    """

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        return x * self.factors(positions.clamp(min=0)).to(x.dtype)

    def formulas(self) -> Mapping[str, Rows]:
        return {} if self.learned else {"factors": sinusoids.formula(self.width)}

    def __init__(
        self, geometry: Geometry, table: Literal["learned", "sinusoidal"] = "learned"
    ) -> None:
        super().__init__()
        self.factors: torch.nn.Module
        self.width, self.learned = geometry.width, table == "learned"
        if self.learned:
            trained = torch.nn.Embedding(geometry.max_positions, geometry.width)
            torch.nn.init.normal_(trained.weight, mean=1.0, std=0.2)
            self.factors = trained
            return
        self.check_multiple("width", geometry.width, 2, "choose another width or table=learned")
        self.factors = self.filled("factors", geometry.max_positions)


class MultiplicativeOracle(Oracle, of=Multiplicative):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        trained = self.weights.get("factors.weight")
        return x * (sinusoids.row(position, len(x)) if trained is None else trained[position])
