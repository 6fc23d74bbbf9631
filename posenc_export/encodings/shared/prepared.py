"""Tables that are computed from trained weights, again after weights have changed."""

from typing import Any, Iterator, Self, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table
from posenc_export.shared.refusal import refusal

MOST_STEPS = 1 << 22  # steps of a recurrence, which run one after the other; 20 to 100 us each


def _loaded(encoding: PositionEncoding, _: object) -> None:
    encoding.prepare()


class Prepared(PositionEncoding):
    """An encoding whose `tabulate` computes tables from its weights. It calls `prepare` when its
    weights exist; loaded weights and the return from training to eval mode do so again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_load_state_dict_post_hook(_loaded)

    def tabulate(self) -> None:
        """Compute the tables on the CPU."""
        raise NotImplementedError

    def prepare(self) -> None:
        self.tabulate()
        self.to(next(self.parameters()).device)
        self.prepared = self.versions()

    def versions(self) -> list[int]:
        """Return the version counters of parameters, which grow when they are modified."""
        return [parameter._version for parameter in self.parameters()]

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the return to eval rebuilds the tables if weights changed."""
        super().train(mode)
        if not mode and self.prepared != self.versions():
            self.prepare()
        return self


class Trajectory(Prepared):
    """x + p_k, where the rows p_0, p_1, ... follow from p_0 by a recurrence. A subclass creates its
    weights, then calls `prepare`.

    In eval mode rows are read from a table, which is computed in float64; in training mode
    gradients flow to the weights through the recurrence.

    Args:
        name: registry key, for messages.
        geometry: width E, max_positions.
        substeps: steps of the recurrence between two positions.

    Raises:
        ValueError: more than MOST_STEPS steps in total.
    """

    def __init__(self, name: str, geometry: Geometry, substeps: int = 1) -> None:
        super().__init__()
        if geometry.max_positions * substeps > MOST_STEPS:
            positions = f"{geometry.max_positions} positions"
            positions += f" of {substeps} substeps" if substeps > 1 else ""
            rule = f"at most {MOST_STEPS} steps, which run one after the other"
            raise refusal(name, rule, positions, "choose fewer")
        self.count = geometry.max_positions
        self.first = torch.nn.Parameter(torch.randn(geometry.width))

    def weights(self) -> tuple[Tensor, ...]:
        """Return p_0 and the other weights, which `rows` takes."""
        raise NotImplementedError

    def rows(self, weights: Sequence[Any], count: int, library: Any) -> Iterator[Any]:
        """Yield the first `count` rows [E] for weights of numpy or torch, which is `library`."""
        raise NotImplementedError

    def exact(self) -> Iterator[np.ndarray]:
        """Yield the rows [E] of current weights, float64."""
        weights = [weight.detach().double().numpy() for weight in self.weights()]
        return self.rows(weights, self.count, np)

    def tabulate(self) -> None:
        table = np.zeros((self.count, len(self.first)))
        for k, row in enumerate(self.exact()):
            table[k] = row
        self.table = Table(table)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        rows = self.table(positions)
        if not torch.jit.is_scripting():
            if self.training:
                rows = self.trained(positions)
        return x + rows.to(x.dtype)

    def trained(self, positions: Tensor) -> Tensor:
        """Rows [B,S,E] float64 of current weights, with gradients, from position 0 on."""
        weights = [weight.to(torch.float64) for weight in self.weights()]
        count = int(positions.max().clamp(min=0)) + 1
        rows = torch.stack(list(self.rows(weights, count, torch)))  # [count,E]
        return torch.nn.functional.embedding(positions.clamp(min=0), rows)


class TrajectoryOracle(Oracle, of=Trajectory):
    def __init__(self, encoding: Trajectory) -> None:
        super().__init__(encoding)
        self.following, self.rows = encoding.exact(), list[np.ndarray]()

    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        while len(self.rows) <= position:
            self.rows.append(next(self.following))
        return x + self.rows[position]
