"""Learned absolute positions (Gehring et al. 2017; Devlin et al. 2018, BERT; Radford et al. 2018, GPT)."""

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding


class Learned(PositionEncoding):
    """x + P[p + offset], P trained.

    Hook: embed. State: none. Range: 0 .. max_positions - 1; beyond it there is no row, and the session refuses.

    Args:
        geometry: max_positions rows of width E.
        offset: rows left unused at the front; 2 in OPT, padding_idx + 1 in RoBERTa.

    Raises:
        ValueError: negative offset.
    """

    def __init__(self, geometry: Geometry, offset: int = 0) -> None:
        super().__init__()
        if offset < 0:
            raise ValueError(f"learned: offset is 0 or more, got {offset}")
        self.offset = offset
        self.table = torch.nn.Embedding(geometry.max_positions + offset, geometry.width)
        torch.nn.init.normal_(self.table.weight, std=0.02)  # the standard deviation of BERT and GPT-2

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        return x + self.table(positions.clamp(min=0) + self.offset)

    def oracle(self) -> Oracle:
        return LearnedOracle(self.table.weight.detach().double().numpy(), self.offset)


class LearnedOracle(Oracle):
    def __init__(self, table: np.ndarray, offset: int) -> None:
        self.table, self.offset = table, offset

    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        row = self.table[position + self.offset]
        return np.array([x[n] + row[n] for n in range(len(x))])
