"""The contract of a position encoding: four identity hooks, a range, and a float64 oracle written entry by entry."""

from dataclasses import dataclass
from typing import Optional, Tuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """What an encoding may know of its model.

    Args:
        width: model width E.
        heads: query heads H.
        head_size: head size D.
        max_positions: positions 0 .. max_positions - 1 are the declared range.
        causal: keys after the query are hidden.
    """

    width: int
    heads: int
    head_size: int
    max_positions: int
    causal: bool = True


class Oracle:
    """The formula once more, in float64, one entry at a time; identity where the encoding does not act."""

    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [E] of one token, float64."""
        return x

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [D] of one query or key head, float64."""
        return x

    def bias(self, head: int, query: int, key: int) -> float:
        """Score added for one head and one pair of positions."""
        return 0.0


class PositionEncoding(torch.nn.Module):
    """Identity at every hook; an encoding overrides those where it acts, and `oracle`."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 (-1 padding) to [B,S,E]."""
        return x

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 (-1 padding) to the same shapes."""
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to scores [B,H,S,T] float32, or None for none; entries at padding are ignored."""
        return None

    def oracle(self) -> Oracle:
        return Oracle()


class Table(torch.nn.Module):
    """Rows [M,n] built in float64, kept in float32 whatever the model is cast to, read with Gather."""

    rows: Tensor

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__()
        self.exact = np.ascontiguousarray(rows, dtype=np.float32)
        self.register_buffer("rows", torch.from_numpy(self.exact), persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)
        if self.rows.device.type != "meta":  # a cast to half and back would keep half the digits: take the exact rows again
            self.rows = torch.from_numpy(self.exact).to(self.rows.device)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """positions [B,S] int64, -1 read as 0, to [B,S,n] float32."""
        return torch.nn.functional.embedding(positions.clamp(min=0), self.rows)
