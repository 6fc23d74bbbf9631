"""Positions from a recurrent cell without input (Liu et al. 2020, Learning to Encode Position
for Transformer with Continuous Dynamical Model, 2.2).
"""

import math
from typing import Any, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.prepared import Trajectory


class Recurrent(Trajectory):
    """x + p_k, p_(k+1) = GRU(p_k) without input, p_0 and the cell trained.

    The recurrence does not depend on tokens, so it is run once, in float64, and read as a table.
    `prepare` runs it again after weights have changed. In training mode every call does this, and
    gradients flow to the weights through the recurrence, up to the last position of the call. The
    initial cell rotates pairs of entries as a sinusoid, so that all positions differ; random
    weights would converge to a fixed point.

    Args:
        geometry: width E, max_positions.

    Raises:
        ValueError: more than prepared.MOST_STEPS positions.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__("recurrent", geometry)
        width, bound = geometry.width, 0.1 / math.sqrt(geometry.width)
        gates = torch.empty(2 * width, width).uniform_(-bound, bound)
        offsets = torch.empty(2 * width).uniform_(-0.1, 0.1)
        self.weight = torch.nn.Parameter(torch.cat((gates, 4 * _turning(width))))
        self.offset = torch.nn.Parameter(torch.cat((offsets, torch.zeros(width))))
        self.prepare()

    def weights(self) -> tuple[Tensor, ...]:
        return self.first, self.weight, self.offset

    def rows(self, weights: Sequence[Any], count: int, library: Any) -> Iterator[Any]:
        row, weight, offset = weights
        width = len(row)
        yield row
        for _ in range(count - 1):
            gates = weight @ row + offset
            reset = 1 / (1 + library.exp(-gates[:width]))
            update = 1 / (1 + library.exp(-gates[width : 2 * width]))
            row = (1 - update) * library.tanh(reset * gates[2 * width :]) + update * row
            yield row


def _turning(width: int) -> Tensor:
    """Matrix [E,E] that rotates pair k of entries by 10000^(-2k/E)."""
    angles = 10000.0 ** (-np.arange(0, width, 2) / width)
    waves = [(math.cos(a), math.sin(a)) for a in angles]
    blocks = [torch.tensor([[c, -s], [s, c]], dtype=torch.float32) for c, s in waves]
    return torch.block_diag(*blocks)[:width, :width]
