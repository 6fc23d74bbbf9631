"""Conditional positional encoding of a grid: a depthwise convolution, zero-padded at the edge
(Chu et al. 2021, Conditional Positional Encodings, 3.2).
"""

import itertools
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.window import window_of
from posenc_export.shared.refusal import refusal


class ConditionalConv2D(PositionEncoding):
    """x_(r,c) + b + sum_(m,n) w_(m,n) * x_(r+m,c+n), m, n = -(kernel-1)/2 .. (kernel-1)/2, zeros
    outside the grid and in empty cells.

    Position p is at row p // columns and column p % columns. Tokens may come in any order, after
    padding, and leave cells of the grid empty. Memory: the whole grid [B,rows*columns,E], for any
    number of tokens.

    Bidirectional attention only: a token depends on later tokens.

    Args:
        geometry: width E, one filter per entry.
        rows, columns: size of the grid; 0 for the smallest square that holds max_positions.
        kernel: side of a filter in tokens, odd.
    """

    works_in = ("bidirectional",)
    least = {"rows": 0, "columns": 0, "kernel": 3}
    most = {"kernel": 1023}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 (-1 padding) to [B,S,E]."""
        cells = self.rows * self.columns
        # Padding goes to an extra cell after the grid.
        cell = torch.where(positions.lt(0), cells, positions).unsqueeze(2)
        cell = cell.expand(-1, -1, x.size(2))  # [B,S,E]
        image = torch.zeros([x.size(0), cells + 1, x.size(2)], dtype=x.dtype, device=x.device)
        image = image.scatter(1, cell, x)[:, :cells].transpose(1, 2)
        y = self.convolution(image.unflatten(2, [self.rows, self.columns]))
        return x + y.flatten(2).transpose(1, 2).gather(1, cell.clamp(max=cells - 1))

    def __init__(
        self, geometry: Geometry, rows: int = 0, columns: int = 0, kernel: int = 3
    ) -> None:
        super().__init__()
        self.rows, self.columns = window_of("conditional_conv_2d", geometry, rows, columns)
        self.kernel = kernel
        if kernel % 2 == 0:
            raise refusal("conditional_conv_2d", "an odd kernel", kernel, "choose another kernel")
        width = geometry.width
        self.convolution = torch.nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)


class ConditionalConv2DOracle(Oracle, of=ConditionalConv2D):
    def embed_rows(self, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        columns, reach = self.encoding.columns, self.encoding.kernel // 2
        at = {divmod(p, columns): token for p, token in zip(positions, x, strict=True)}
        filters = self.weights["convolution.weight"][:, 0]
        out = x + self.weights["convolution.bias"]
        for index, p in enumerate(positions):
            for m, n in itertools.product(range(-reach, reach + 1), repeat=2):
                place = p // columns + m, p % columns + n
                if place in at:
                    out[index] += filters[:, m + reach, n + reach] * at[place]
        return out
