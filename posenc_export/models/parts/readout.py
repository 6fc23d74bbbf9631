"""Readouts: pooling of the hidden states of a sequence (Reimers and Gurevych 2019, Sentence-BERT,
3), and what follows it.

Poolings see the tokens of a row wherever its padding is. They compute in float32.
"""

from typing import Any, List, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.ops import TokenPlaces


class Mean(torch.nn.Module):
    """Mean of the tokens, sum_t x_t / n."""

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        """x [B,S,E] float32, counted [B,S]: place in the row from 1, 0 at padding; to [B,E]."""
        inside = counted.gt(0).unsqueeze(2)
        return x.masked_fill(~inside, 0.0).sum(1) / inside.sum(1).clamp(min=1)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,E] to [E], float64."""
        return np.asarray(x.mean(0))


class MeanSqrtLength(torch.nn.Module):
    """Sum of the tokens over the root of their number, sum_t x_t / sqrt(n)."""

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        inside = counted.gt(0).unsqueeze(2)
        return x.masked_fill(~inside, 0.0).sum(1) / inside.sum(1).clamp(min=1).float().sqrt()

    def exact(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x.sum(0) / np.sqrt(len(x)))


class WeightedMean(torch.nn.Module):
    """sum_t t x_t / sum_t t with t = 1 .. n (Muennighoff 2022, SGPT)."""

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        weights = counted.unsqueeze(2).float()
        total = (x.masked_fill(weights.eq(0.0), 0.0) * weights).sum(1)
        return total / weights.sum(1).clamp(min=1.0)

    def exact(self, x: np.ndarray) -> np.ndarray:
        return np.average(x, 0, np.arange(1, len(x) + 1))


class Largest(torch.nn.Module):
    """Largest value of each number over the tokens."""

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        return x.masked_fill(counted.eq(0).unsqueeze(2), float("-inf")).amax(1)

    def exact(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x.max(0))


class First(torch.nn.Module):
    """The first token of a row, which most tokenizers make [CLS]."""

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        return x.masked_fill(counted.ne(1).unsqueeze(2), 0.0).sum(1)

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x[0]


class Last(torch.nn.Module):
    """The last token of a row."""

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        last = counted.amax(1, keepdim=True)
        return x.masked_fill(counted.ne(last).unsqueeze(2), 0.0).sum(1)

    def exact(self, x: np.ndarray) -> np.ndarray:
        return x[-1]


class Readout(torch.nn.Module):
    """A second output, computed from hidden states: poolings, whose results are concatenated, then
    what follows them. Without a pooling there is an output for each token.

    Args:
        pooling: poolings, or none.
        after: a model without caches that was read, [B,S,E] to [B,S,N]; None for pooling alone.
    """

    def __init__(self, pooling: Sequence[torch.nn.Module], after: Any = None) -> None:
        super().__init__()
        self.pooled, self.pooling = len(pooling) > 0, torch.nn.ModuleList(pooling)
        self.after = after

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] with -1 at padding, to [B,N], or [B,S,N] without pooling."""
        if self.pooled:
            inside = positions.ge(0)
            counted = inside.long().cumsum(1).masked_fill(~inside, 0)
            wide = x.float()
            reduced: List[Tensor] = []
            for pool in self.pooling:
                reduced.append(pool(wide, counted))
            x, positions = torch.cat(reduced, 1).to(x.dtype).unsqueeze(1), positions[:, :1]
        if self.after is not None:
            places = TokenPlaces(positions, positions, positions, positions[:, 0])
            x, _ = self.after(x, places, [])
        return x.squeeze(1) if self.pooled else x

    @torch.jit.unused
    def in_dtype(self, dtype: torch.dtype) -> "Readout":
        """Return the readout for hidden states in a dtype."""
        after = None if self.after is None else self.after.in_dtype(dtype)
        return Readout([*self.pooling], after)

    @torch.jit.unused
    def exact(self, x: np.ndarray) -> np.ndarray:
        """Compute the hidden states of a row [n,E] to [N], or [n,N] without pooling, float64."""
        if self.pooled:
            pooled: List[Any] = list(self.pooling)
            x = np.concatenate([pool.exact(x) for pool in pooled])[None]
        if self.after is not None:
            x = self.after.exact(x, range(len(x)), ())
        return x[0] if self.pooled else x


POOLINGS = {
    "mean": Mean,
    "mean_sqrt_length": MeanSqrtLength,
    "weighted_mean": WeightedMean,
    "max": Largest,
    "cls": First,
    "last": Last,
}
