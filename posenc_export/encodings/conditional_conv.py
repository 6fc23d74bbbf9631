"""Conditional positional encoding: a convolution whose zero padding marks the edge (Chu et al.
2021, Conditional Positional Encodings, 3.2; Baevski et al. 2020, wav2vec 2.0, 2).
"""

import math
from typing import Literal, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, StateSpec
from posenc_export.ops import recurrence
from posenc_export.shared.refusal import refusal


class ConditionalConv(PositionEncoding):
    """x_t + act(b + sum_m w_m x_(t-m)), m = 0 .. kernel - 1, zeros before the first token: the
    causal form of the paper's convolution. In bidirectional attention m = -floor((kernel-1)/2) ..
    floor(kernel/2), zeros after the last token, too.

    State: the last kernel - 1 inputs [B,kernel-1,E] of a causal model. Only the order of tokens
    matters, not their positions.

    Args:
        geometry: width E.
        kernel: length of a filter in tokens.
        groups: number of groups of entries; an output reads only the entries of its group. 0 for E
            groups, as in the paper; wav2vec 2.0 has 16. It divides E.
        activation: act: "none", as in the paper, or "gelu", as in wav2vec 2.0.

    Weights:
        convolution.weight: w, [E,E/groups,kernel], the oldest token first; without weight
            normalization, which wav2vec 2.0 applies.
    """

    # A filter of one token sees no neighbour.
    least = {"kernel": 2, "groups": 0}
    most = {"kernel": 1 << 16, "groups": 1 << 16}

    def embed_next(
        self, x: Tensor, positions: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """x [B,S,E], positions [B,S], states [tail [B,kernel-1,E]], or [] if not causal."""
        order, count = recurrence.valid_first(positions)
        wide = order.unsqueeze(2).expand(-1, -1, self.width)
        inside = x if self.causal else x.masked_fill(positions.lt(0).unsqueeze(2), 0.0)
        tokens = torch.cat(states + [torch.zeros_like(x).scatter(1, wide, inside)], dim=1)
        y = self.convolution(tokens.transpose(1, 2)).transpose(1, 2)
        if self.gelu:
            y = torch.nn.functional.gelu(y)
        out = x + y.gather(1, wide)
        if not self.causal:
            return out, states
        last = count + torch.arange(self.kernel - 1, device=x.device)  # [B,kernel-1]
        return out, [tokens.gather(1, last.unsqueeze(2).expand(-1, -1, self.width))]

    def edges(self) -> dict[str, int]:
        reach = self.kernel if self.causal else self.kernel // 2 + 1
        return {f"filter of {self.kernel} tokens": reach}

    def __init__(
        self,
        geometry: Geometry,
        kernel: int = 4,
        groups: int = 0,
        activation: Literal["none", "gelu"] = "none",
    ) -> None:
        super().__init__()
        self.width, self.kernel, self.causal = geometry.width, kernel, geometry.causal
        self.gelu, width, groups = activation == "gelu", geometry.width, groups or geometry.width
        if width % groups:
            rule = f"groups that divide the width {width}"
            raise refusal("conditional_conv", rule, groups, "choose another number of groups")
        # The last output of an even kernel, one too many, is not gathered.
        padding = 0 if self.causal else kernel // 2
        self.convolution = torch.nn.Conv1d(width, width, kernel, groups=groups, padding=padding)

    def embed_states(self) -> list[StateSpec]:
        return [StateSpec("tail", (self.kernel - 1, self.width))] if self.causal else []


class ConditionalConvOracle(Oracle, of=ConditionalConv):
    def embed_rows(self, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        filters, kernel = self.weights["convolution.weight"], self.encoding.kernel
        groups = x.shape[1] // filters.shape[1]
        ahead = 0 if self.encoding.causal else (kernel - 1) // 2
        y = np.zeros(x.shape) + self.weights["convolution.bias"]
        for t in range(len(x)):
            for back in range(-ahead, kernel - ahead):
                if 0 <= t - back < len(x):
                    tap = filters[:, :, kernel - 1 - ahead - back]
                    token = x[t - back].reshape(groups, -1, 1)
                    y[t] += (tap.reshape(groups, -1, filters.shape[1]) @ token).ravel()
        if self.encoding.gelu:
            y *= np.vectorize(math.erfc, otypes=[np.float64])(-y / math.sqrt(2)) / 2
        return x + y
