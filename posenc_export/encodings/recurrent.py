"""Positions from a recurrent cell without input (Liu et al. 2020, Learning to Encode Position for Transformer with Continuous Dynamical Model, 2.2)."""

import math
from typing import Any, Callable, List, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table, prepare_if_changed, prepare_loaded, weight_versions
from posenc_export.encodings.shared.trajectory import Rows, check_steps


class Recurrent(PositionEncoding):
    """x + p_k, p_(k+1) = GRU(p_k) without input, p_0 and the cell trained.

    The recurrence does not depend on tokens, so it is run once, in float64, and read as a table. `prepare` runs it again after weights have changed. In
    training mode calls do so themselves, and gradients flow to the weights through the recurrence, up to the last position of the call. The initial cell
    rotates pairs of entries as a sinusoid, so that all positions differ; random weights would converge to a fixed point.

    Hook: embed. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: width E, max_positions.

    Raises:
        ValueError: more than trajectory.MOST_STEPS positions.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        check_steps("recurrent", geometry.max_positions)
        width = geometry.width
        self.count, bound = geometry.max_positions, 0.1 / math.sqrt(width)
        self.first = torch.nn.Parameter(torch.randn(width))
        self.weight = torch.nn.Parameter(torch.cat((torch.empty(2 * width, width).uniform_(-bound, bound), 4 * _turning(width))))
        self.offset = torch.nn.Parameter(torch.cat((torch.empty(2 * width).uniform_(-0.1, 0.1), torch.zeros(width))))
        self.table = Table(np.zeros((1, width)))
        self.prepare()
        self.register_load_state_dict_post_hook(prepare_loaded)

    def prepare(self) -> None:
        first = self.first.detach().double().numpy()
        self.table = Table(np.concatenate((first[None], self.following(first, self.count - 1))))
        self.prepared = weight_versions(self)

    def train(self, mode: bool = True) -> "Recurrent":
        """Set the mode, as torch.nn.Module.train; the return to eval mode rebuilds the table if weights have changed."""
        super().train(mode)
        if not mode:
            prepare_if_changed(self)
        return self

    def following(self, row: np.ndarray, count: int) -> np.ndarray:
        """The `count` rows [count,E] float64 that follow a row [E]; extends a table from its last row."""
        weight, offset = self.weight.detach().double().numpy(), self.offset.detach().double().numpy()
        rows = np.zeros((count, len(row)))
        for k in range(count):
            rows[k] = row = _next(row, weight, offset, np.exp, np.tanh)
        return rows

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        rows = self.table(positions)
        if not torch.jit.is_scripting():
            if self.training:
                rows = self.trained(positions)
        return x + rows.to(x.dtype)

    @torch.jit.unused
    def trained(self, positions: Tensor) -> Tensor:
        """Rows [B,S,E] for the current weights, with gradients."""
        prepare_if_changed(self)
        return Rows.apply(self.table.rows, positions, _rows, self.first, self.weight, self.offset)  # type: ignore[no-any-return]

    def oracle(self) -> Oracle:
        return RecurrentOracle([value.detach().double() for value in (self.first, self.weight, self.offset)])


def _next(row: Any, weight: Any, offset: Any, exp: Callable[[Any], Any], tanh: Callable[[Any], Any]) -> Any:
    """The row [E] that follows a row [E]; works on numpy and on torch."""
    width, gates = len(row), weight @ row + offset
    reset, update = 1 / (1 + exp(-gates[:width])), 1 / (1 + exp(-gates[width : 2 * width]))
    return (1 - update) * tanh(reset * gates[2 * width :]) + update * row


def _rows(weights: Sequence[Tensor], count: int) -> Tensor:
    """The first `count` rows [count,E], differentiable."""
    first, weight, offset = weights
    rows = [first]
    for _ in range(count - 1):
        rows.append(_next(rows[-1], weight, offset, torch.exp, torch.tanh))
    return torch.stack(rows)


def _turning(width: int) -> Tensor:
    """Matrix [E,E] that rotates pair k of entries by 10000^(-2k/E)."""
    angles = 10000.0 ** (-np.arange(0, width, 2) / width)
    blocks = [torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]], dtype=torch.float32) for a in angles]
    return torch.block_diag(*blocks)[:width, :width]


class RecurrentOracle(Oracle):
    """Uses torch.nn.GRUCell, with weights and biases of 0 for its input."""

    def __init__(self, weights: List[Tensor]) -> None:
        first, weight, offset = weights
        width = len(first)
        self.cell = torch.nn.GRUCell(1, width).double()
        for part, value in zip(self.cell.parameters(), (torch.zeros(3 * width, 1), weight, torch.zeros(3 * width), offset), strict=True):
            part.data = value.double()
        self.rows = [first[None]]

    @torch.no_grad()
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        nothing = torch.zeros(1, 1, dtype=torch.float64)
        while len(self.rows) <= position:
            self.rows.append(self.cell(nothing, self.rows[-1]))
        return x + self.rows[position][0].numpy()
