"""Learned absolute positions (Gehring et al. 2017; Devlin et al. 2018, BERT; Radford et al.
2018, GPT).
"""

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding


class Learned(PositionEncoding):
    """x + P[p + offset], P trained.

    A session refuses later positions, which have no row.

    Args:
        geometry: max_positions rows of width E.
        offset: number of unused rows at the front; 2 in OPT, padding_idx + 1 in RoBERTa.
    """

    least = {"offset": 0}
    most = {"offset": 1 << 20}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        return x + self.table(positions.clamp(min=0) + self.offset)

    def row_rules(self) -> list[str]:
        return [f"max(q, 0) + {self.offset}"]

    def __init__(self, geometry: Geometry, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.table = torch.nn.Embedding(geometry.max_positions + offset, geometry.width)
        torch.nn.init.normal_(self.table.weight, std=0.02)  # as BERT and GPT-2


class LearnedOracle(Oracle, of=Learned):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        return x + self.weights["table.weight"][position + self.encoding.offset]
