"""Windows: regions of operators that need the last tokens before each one alone."""

import itertools
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from posenc_export.reading.axes import Roles, axis_of, same, select

FAILED = (RuntimeError, IndexError, ValueError, TypeError)  # raised by torch for other shapes
MOST_TOKENS = 1024  # of a sequence that shows how far a window reaches
LARGER = 16.0  # times the numbers of the example


def reach_of(
    properties: Any, region: Sequence[Node], root: Node, node: Node, roles: Roles
) -> int | None:
    """Return how many earlier tokens a region reads for each token; None if it is no window."""
    own, of = properties.steps[root].roles, properties.values.of
    axis, to = axis_of(own, "Q"), axis_of(roles, "Q")
    length = _long_enough(properties, region)
    # An even and an odd token: operators on every second token would pass at even ones.
    places = length // 2, length // 2 + 1

    def continues(x: Tensor, y: Tensor, at: int, reach: int) -> bool:
        """Return whether outputs from token `at` on need no more than `reach` tokens before it, and
        zeros before the first token change nothing.
        """
        late = properties.run_region(region, root, x.narrow(axis, at - reach, length - at + reach))
        if not same(late.narrow(to, reach, length - at), y.narrow(to, at, length - at)):
            return False
        begin = x.narrow(axis, 0, at)
        zeros = torch.zeros_like(x.narrow(axis, 0, reach))
        early = properties.run_region(region, root, torch.cat((zeros, begin), axis))
        expected = y.narrow(to, 0, at)
        if not same(early.narrow(to, reach, at), expected):
            return False
        return same(properties.run_region(region, root, begin), expected)

    try:
        rows, counts = {"B": [2, 0]}, properties.counts
        some = properties.run_region(region, root, select(of[root], own, rows, counts))
        if not same(some, select(of[node], roles, rows, counts)):
            return None
        drawn = _drawn(properties, root, length)
        runs = [(x, properties.run_region(region, root, x)) for x in drawn]
        tried = list(itertools.product(runs, places))

        def holds(reach: int) -> bool:
            return all(continues(x, y, at, reach) for (x, y), at in tried)

        too_few, enough, most = 0, 1, length // 2 - 1
        if not holds(most):
            return None
        while not holds(enough):
            too_few, enough = enough, min(2 * enough, most)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if holds(middle) else (middle, enough)
        return enough
    except FAILED:
        return None


def _long_enough(properties: Any, region: Sequence[Node]) -> int:
    """Return a number of tokens that shows how far a region reads: three times its largest whole
    number, which may be a padding or a dilation.
    """
    numbers = pytree.tree_leaves([(node.args, node.kwargs) for node in region])
    sizes = [abs(n) for n in numbers if type(n) is int and abs(n) < properties.values.max_positions]
    return max(properties.counts["Q"], min(3 * max(sizes, default=0), MOST_TOKENS))


def _drawn(properties: Any, root: Node, length: int) -> list[Tensor]:
    """Return values of a root for one row of a number of tokens, drawn from its own values."""
    own, generator = properties.steps[root].roles, torch.Generator().manual_seed(8)
    axis, values = axis_of(own, "Q"), properties.values
    found = []
    for x in [of[root] for of in (values.of, values.varied) if root in of]:
        index = torch.randint(x.shape[axis], (length,), generator=generator)
        found.append(select(x, own, {"B": [0]}, values.counts).index_select(axis, index))
    if found[0].is_floating_point():  # larger numbers would show a bound such as a clamp
        found[0] = found[0] * (0.6 + 0.8 * torch.rand(found[0].shape, generator=generator))
        found.append(found[0] * LARGER)
        found.append(found[0].narrow(axis, 0, 1).expand_as(found[0]))  # equal tokens: sums grow
    return found
