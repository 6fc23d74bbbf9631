"""Operators of a graph on the values of a call, where rows have positions of their own."""

import warnings
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from posenc_export.reading.axes import FINE, Counts, Roles, kinds, same, shape_of, split
from posenc_export.reading.values import Values


class Operators:
    """Operators on values of a call.

    Args:
        values: the graph.

    Attributes:
        given: returns the value of a node that depends on weights alone; None for a size.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.given: Callable[[Node], Any] = values.of.get
        self._stacked: dict[Node, bool] = {}

    def by_row(
        self,
        node: Node,
        values: Sequence[Any],
        apart: Sequence[bool],
        counts: Counts,
        role: str,
        roles: Roles,
    ) -> Tensor:
        """Run an operator for each row alone.

        Args:
            apart: which values have an axis of rows first.

        Returns:
            the result with rows first.
        """
        rank, pairs = len(roles), list(zip(values, apart, strict=True))

        def run(inputs: Sequence[Any]) -> Any:
            return self.values.call(node, inputs, counts, role, roles)

        def row(*some: Tensor) -> Any:
            left = iter(some)
            return run([next(left) if own else x for x, own in pairs])

        def stacked() -> Any:  # all rows at once, each value with as many axes as the output
            axes = (slice(None), *[None] * rank)
            few = [own and x.dim() <= rank for x, own in pairs]
            of = zip(values, few, strict=True)
            return run([x[axes[: rank + 2 - x.dim()]] if add else x for x, add in of])

        if self._stacked.get(node):
            result: Tensor = stacked()
            return result
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vmap's own
            result = torch.vmap(row)(*(x for x, own in pairs if own))
        if node not in self._stacked and min(counts["Q"], counts.get("keys", counts["K"])) > 1:
            # With one token, an operator that mixes rows and tokens would not be noticed.
            try:
                self._stacked[node] = same(stacked(), result, FINE)
            except (RuntimeError, IndexError, ValueError, TypeError):  # of torch for other axes
                self._stacked[node] = False
        return result


def rows_first(x: Tensor, roles: Roles, counts: Counts) -> Tensor:
    """Return x as [B, ...], where each row has the axes of a value of one row."""
    flat = kinds(roles)
    rows = flat.index("B")
    if len(flat) == len(roles):
        return x.movedim(rows, 0).unsqueeze(rows + 1)
    alone = shape_of(roles, {**counts, "B": 1})
    return split(x, roles, counts).movedim(rows, 0).reshape([counts["B"], *alone])


def rows_in_place(x: Tensor, roles: Roles, counts: Counts) -> Tensor:
    """Invert `rows_first`: put the rows back into their axis."""
    flat = [factor for axis in roles for factor in axis]
    rows = [factor.kind for factor in flat].index("B")
    if len(flat) == len(roles):
        return x.squeeze(rows + 1).movedim(0, rows)
    sizes: list[Any] = [factor.size(counts) for i, factor in enumerate(flat) if i != rows]
    return x.reshape([counts["B"], *sizes]).movedim(0, rows).reshape(shape_of(roles, counts))


def of_all_rows(x: Tensor, roles: Roles, counts: Counts) -> Tensor:
    """Expand x, a value of one row, to the number of rows of a call."""
    parts = split(x, roles, {**counts, "B": 1})
    sizes = [-1] * parts.dim()
    sizes[kinds(roles).index("B")] = counts["B"]
    return parts.expand(sizes).reshape(shape_of(roles, counts))
