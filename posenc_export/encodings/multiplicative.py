"""Multiplicative positions (Dufter et al. 2021, Position Information in Transformers, 3.1)."""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table

TABLES = ("learned", "sinusoidal")


class Multiplicative(PositionEncoding):
    """x * P[p], P trained, or the interleaved sinusoid sin(p w_k), cos(p w_k), w_k = 10000^(-2k/E).

    Hook: embed. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: width E, max_positions.
        table: "learned" (initialised around 1) or "sinusoidal".

    Raises:
        ValueError: unknown table, an odd width with table "sinusoidal".
    """

    def __init__(self, geometry: Geometry, table: str = "learned") -> None:
        super().__init__()
        if table not in TABLES:
            raise ValueError(f"multiplicative: expected table to be one of {', '.join(TABLES)}, got {table!r}")
        self.table = table
        self.factors: torch.nn.Module
        if table == "learned":
            trained = torch.nn.Embedding(geometry.max_positions, geometry.width)
            torch.nn.init.normal_(trained.weight, mean=1.0, std=0.2)
            self.factors = trained
            return
        if geometry.width % 2:
            raise ValueError(f"multiplicative: expected an even width for table=sinusoidal, got {geometry.width}; choose another width or table=learned")
        angles = np.arange(geometry.max_positions)[:, None] * 10000.0 ** (-np.arange(0, geometry.width, 2) / geometry.width)
        self.factors = Table(np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(len(angles), -1))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        return x * self.factors(positions.clamp(min=0)).to(x.dtype)

    def oracle(self) -> Oracle:
        return MultiplicativeOracle(next(self.factors.parameters()).detach().double().numpy() if self.table == "learned" else np.zeros((0, 0)))


class MultiplicativeOracle(Oracle):
    def __init__(self, trained: np.ndarray) -> None:
        self.trained = trained

    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        if len(self.trained):
            return np.array([value * factor for value, factor in zip(x, self.trained[position], strict=True)])
        angles = [position / math.pow(10000.0, 2 * (n // 2) / len(x)) for n in range(len(x))]
        return np.array([value * (math.cos(a) if n % 2 else math.sin(a)) for n, (value, a) in enumerate(zip(x, angles, strict=True))])
