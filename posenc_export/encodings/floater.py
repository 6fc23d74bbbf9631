"""Positions on the trajectory of a trained differential equation (Liu et al. 2020, FLOATER,
3.1).
"""

from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.prepared import Trajectory


class FLOATER(Trajectory):
    """x + p(k step), dp/dt = W2 tanh(W1 [p, t] + b1) + b2, p(0) trained.

    Positions k count from 0 and the first token gets p(0); the paper counts from 1.

    The equation does not depend on tokens, so it is solved once, in float64, by the classical
    Runge-Kutta method with fixed steps, and read as a table. `prepare` solves it again after
    weights have changed. In training mode every call does this, and gradients flow to the weights
    through the steps of the method, up to the last position of the call. If dp/dt = A p and A
    rotates pairs of entries, p is the sinusoid; tanh near 0 approximates that field.

    Args:
        geometry: width E, max_positions.
        hidden: width of the field's hidden layer.
        step: time between two positions.
        substeps: Runge-Kutta steps between two positions.

    Raises:
        ValueError: more than prepared.MOST_STEPS steps in total.
    """

    above = {"step": 0}
    least = {"hidden": 1, "substeps": 1}
    most = {"hidden": 4096, "substeps": 1024}

    def __init__(
        self, geometry: Geometry, hidden: int = 16, step: float = 0.1, substeps: int = 1
    ) -> None:
        super().__init__("floater", geometry, substeps)
        self.step, self.substeps, width = float(step), substeps, geometry.width
        self.inner, self.outer = torch.nn.Linear(width + 1, hidden), torch.nn.Linear(hidden, width)
        self.prepare()

    def weights(self) -> tuple[Tensor, ...]:
        return self.first, *self.inner.parameters(), *self.outer.parameters()

    def rows(self, weights: Sequence[Any], count: int, library: Any) -> Iterator[Any]:
        p, inner, inner_offset, outer, outer_offset = weights
        h = self.step / self.substeps

        def field(p: Any, t: float) -> Any:
            hidden = library.tanh(inner[:, :-1] @ p + inner[:, -1] * t + inner_offset)
            return outer @ hidden + outer_offset

        yield p
        for k in range(1, count):
            for part in range(self.substeps):
                t = (k - 1) * self.step + part * h
                a = field(p, t)
                b = field(p + h / 2 * a, t + h / 2)
                c = field(p + h / 2 * b, t + h / 2)
                p = p + h / 6 * (a + 2 * b + 2 * c + field(p + h * c, t + h))
            yield p
