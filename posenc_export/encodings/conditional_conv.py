"""Conditional positional encoding: a depthwise convolution whose zero padding marks the edge
(Chu et al. 2021, Conditional Positional Encodings, 3.2).
"""

from typing import List, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Edge, Geometry, Oracle, PositionEncoding, StateSpec
from posenc_export.ops import recurrence


class ConditionalConv(PositionEncoding):
    """x_t + b + sum_m w_m * x_(t-m), m = 0 .. kernel - 1, zeros before the first token: the causal
    form of the paper's convolution.

    Hook: embed. State: the last kernel - 1 inputs [B,kernel-1,E]. Range: 0 .. max_positions - 1;
    only the order of tokens matters, not their positions.

    Args:
        geometry: width E, one filter per entry.
        kernel: length of a filter in tokens.

    Raises:
        ValueError: kernel below 2.
    """

    works_in = ("causal",)
    least = {"kernel": 2}  # a filter of one token sees no neighbour
    most = {"kernel": 1 << 16}

    def embed_next(
        self, x: Tensor, positions: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S,E], positions [B,S], states [tail [B,kernel-1,E]]."""
        order, count = recurrence.valid_first(positions)
        wide = order.unsqueeze(2).expand(-1, -1, self.width)
        tokens = torch.cat((states[0], torch.zeros_like(x).scatter(1, wide, x)), dim=1)
        y = self.convolution(tokens.transpose(1, 2)).transpose(1, 2)
        last = count + torch.arange(self.kernel - 1, device=x.device)  # [B,kernel-1]
        out = x + y.gather(1, wide)
        return out, [tokens.gather(1, last.unsqueeze(2).expand(-1, -1, self.width))]

    def edges(self) -> List[Edge]:
        return [Edge(f"filter of {self.kernel} tokens", self.kernel)]

    def __init__(self, geometry: Geometry, kernel: int = 4) -> None:
        super().__init__()
        self.width, self.kernel = geometry.width, kernel
        width = geometry.width
        self.convolution = torch.nn.Conv1d(width, width, kernel, groups=width)

    def embed_states(self) -> List[StateSpec]:
        return [StateSpec("tail", (self.kernel - 1, self.width))]


class ConditionalConvOracle(Oracle, of=ConditionalConv):
    def embed_rows(self, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        filters, kernel = self.weights["convolution.weight"][:, 0], self.encoding.kernel
        out = x + self.weights["convolution.bias"]
        for t in range(len(x)):
            for back in range(min(kernel, t + 1)):
                out[t] += filters[:, kernel - 1 - back] * x[t - back]
        return out
