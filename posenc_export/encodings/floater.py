"""Positions on the trajectory of a trained differential equation (Liu et al. 2020, FLOATER, 3.1)."""

import math
from functools import partial
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table, prepare_if_changed, prepare_loaded, weight_versions
from posenc_export.encodings.shared.trajectory import Rows, check_steps

Field = Callable[[Any, float], Any]


class FLOATER(PositionEncoding):
    """x + p(k step), dp/dt = W2 tanh(W1 [p, t] + b1) + b2, p(0) trained.

    Positions k count from 0 and the first token gets p(0); the paper counts from 1.

    The equation does not depend on tokens, so it is solved once, in float64, by the classical Runge-Kutta method with fixed steps, and read as a table.
    `prepare` solves it again after weights have changed. In training mode calls do so themselves, and gradients flow to the weights through the steps of the
    method, up to the last position of the call. If dp/dt = A p and A rotates pairs of entries, p is the sinusoid; tanh near 0 approximates that field.

    Hook: embed. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: width E, max_positions.
        hidden: width of the field's hidden layer.
        step: time between two positions.
        substeps: Runge-Kutta steps between two positions.

    Raises:
        ValueError: hidden, step or substeps not above 0, more than trajectory.MOST_STEPS steps in total.
    """

    most = {"hidden": 4096, "substeps": 1024}

    def __init__(self, geometry: Geometry, hidden: int = 16, step: float = 0.1, substeps: int = 1) -> None:
        super().__init__()
        if hidden < 1 or not 0 < step < math.inf or substeps < 1:
            raise ValueError(f"floater: expected hidden, step and substeps above 0, got {hidden}, {step} and {substeps}")
        check_steps("floater", geometry.max_positions, substeps)
        self.count, self.step, self.substeps, width = geometry.max_positions, float(step), substeps, geometry.width
        self.first = torch.nn.Parameter(torch.randn(width))
        self.inner, self.outer = torch.nn.Linear(width + 1, hidden), torch.nn.Linear(hidden, width)
        self.table = Table(np.zeros((1, width)))
        self.prepare()
        self.register_load_state_dict_post_hook(prepare_loaded)

    def prepare(self) -> None:
        weights = [value.detach().double().numpy() for value in (self.first, *self.inner.parameters(), *self.outer.parameters())]
        rows = np.zeros((self.count, len(weights[0])))
        for k, row in enumerate(solve(_field(weights[1:], np.tanh), weights[0], self.count, self.step, self.substeps)):
            rows[k] = row
        self.table = Table(rows)
        self.prepared = weight_versions(self)

    def train(self, mode: bool = True) -> "FLOATER":
        """Set the mode, as torch.nn.Module.train; the return to eval mode rebuilds the table if weights have changed."""
        super().train(mode)
        if not mode:
            prepare_if_changed(self)
        return self

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
        recurrence = partial(_rows, step=self.step, substeps=self.substeps)
        weights = (self.first, *self.inner.parameters(), *self.outer.parameters())
        return Rows.apply(self.table.rows, positions, recurrence, *weights)  # type: ignore[no-any-return]

    def oracle(self) -> Oracle:
        return FLOATEROracle(self)


def solve(field: Field, first: Any, count: int, step: float, substeps: int) -> Iterator[Any]:
    """Yield `count` rows [E] of the trajectory that starts at `first`, for t = 0, step, 2 step, ...; works on numpy and on torch."""
    p, h = first, step / substeps
    yield p
    for k in range(1, count):
        for part in range(substeps):
            t = (k - 1) * step + part * h
            a = field(p, t)
            b = field(p + h / 2 * a, t + h / 2)
            c = field(p + h / 2 * b, t + h / 2)
            p = p + h / 6 * (a + 2 * b + 2 * c + field(p + h * c, t + h))
        yield p


def _field(weights: Sequence[Any], tanh: Callable[[Any], Any]) -> Field:
    """The function (p, t) -> W2 tanh(W1 [p, t] + b1) + b2 of weights W1, b1, W2, b2."""
    inner, inner_offset, outer, outer_offset = weights
    return lambda p, t: outer @ tanh(inner[:, :-1] @ p + inner[:, -1] * t + inner_offset) + outer_offset


def _rows(weights: Sequence[Tensor], count: int, step: float, substeps: int) -> Tensor:
    """The first `count` rows [count,E], differentiable."""
    return torch.stack(list(solve(_field(weights[1:], torch.tanh), weights[0], count, step, substeps)))


class FLOATEROracle(Oracle):
    """Solves the same equation with the Runge-Kutta tableau written out, up to the largest position requested."""

    NODES, WEIGHTS = (0.0, 0.5, 0.5, 1.0), (1 / 6, 1 / 3, 1 / 3, 1 / 6)

    def __init__(self, encoding: FLOATER) -> None:
        self.encoding, self.rows = encoding, [encoding.first.detach().double().numpy()]
        self.inner, self.inner_offset, self.outer, self.outer_offset = (
            value.detach().double().numpy() for part in (encoding.inner, encoding.outer) for value in (part.weight, part.bias)
        )

    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        while len(self.rows) <= position:
            self.rows.append(self.next(self.rows[-1], len(self.rows) - 1))
        return x + self.rows[position]

    def next(self, p: np.ndarray, k: int) -> np.ndarray:
        e = self.encoding
        h = e.step / e.substeps
        for part in range(e.substeps):
            slope, increment = np.zeros_like(p), np.zeros_like(p)
            for node, weight in zip(self.NODES, self.WEIGHTS, strict=True):
                at = np.append(p + node * h * slope, math.fsum((k * e.step, part * h, node * h)))
                slope = self.outer @ np.tanh(self.inner @ at + self.inner_offset) + self.outer_offset
                increment = increment + h * weight * slope
            p = p + increment
        return p
