"""Readouts: pooling of the hidden states of a sequence (Reimers and Gurevych 2019, Sentence-BERT,
3), and what follows it.

Poolings see the tokens of a row wherever its padding is. They compute in float32.
"""

from typing import Any

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
    """A second output, computed from hidden states: a pooling, then what follows it.

    Args:
        pooling: one of POOLINGS.
        after: a model without caches that was read, [B,S,E] to [B,S,N]; None for pooling alone.
    """

    def __init__(self, pooling: Any, after: Any = None) -> None:
        super().__init__()
        self.pooling, self.after = pooling, after

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] with -1 at padding, to [B,N]."""
        inside = positions.ge(0)
        counted = inside.long().cumsum(1).masked_fill(~inside, 0)
        x = self.pooling(x.float(), counted).to(x.dtype)
        if self.after is not None:
            first = positions[:, :1]
            places = TokenPlaces(first, first, first, first[:, 0])
            x = self.after(x.unsqueeze(1), places, [])[0].squeeze(1)
        return x

    def in_dtype(self, dtype: torch.dtype) -> "Readout":
        """Return the readout for hidden states in a dtype."""
        after = None if self.after is None else self.after.in_dtype(dtype)
        return Readout(self.pooling, after)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Compute the hidden states of a row [n,E] to [N], float64."""
        pooled = np.asarray(self.pooling.exact(x))
        return pooled if self.after is None else self.after.exact(pooled[None], range(1), ())[0]


POOLINGS = {"mean": Mean, "cls": First, "last": Last}
