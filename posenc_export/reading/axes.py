"""Axes of the values of a graph as products of rows, tokens and constants."""

import itertools
import math
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

LEAST = 1e-3  # smaller numbers may be the rounding of larger ones
NEAR = 2e-5  # of the largest number: what rounding in another order of sums may change
HIDDEN = -5e3  # scores below it have weight 0, and do not show how large other scores are
FINE = 1e-6  # as NEAR, for numbers that are computed by the same operations


class Factor(NamedTuple):
    """A part of an axis.

    Attributes:
        kind: "B" rows, "Q" tokens as queries, "K" tokens as keys, "D" distances from the last
            token, "M" tokens of an encoder, or a constant size.
        left, right: number of entries before and after those of the tokens (padding, sinks).
    """

    kind: str | int
    left: int = 0
    right: int = 0

    def size(self, counts: Mapping[str, Any]) -> Any:
        """Return the size for numbers of rows and tokens by kind; -1 if the number is open."""
        if isinstance(self.kind, int):
            return self.kind
        count = counts[self.kind]
        return -1 if isinstance(count, int) and count < 0 else count + self.left + self.right


Axis = tuple[Factor, ...]
Roles = tuple[Axis, ...]  # of the axes of one value
Counts = dict[str, Any]  # numbers of rows "B", queries "Q", keys "K", and others by their kinds
OF_TOKENS = ("Q", "K", "D")


def factors(roles: Roles) -> list[Factor]:
    """Return the factors of all axes, in order."""
    return [factor for axis in roles for factor in axis]


def kinds(roles: Roles) -> list[str | int]:
    """Return the kinds of the factors of all axes, in order."""
    return [factor.kind for axis in roles for factor in axis]


def tokens(roles: Roles, of: Iterable[Any] = ("Q", "K")) -> list[str | int]:
    """Return the kinds of the factors that run over tokens, in order."""
    return [kind for kind in kinds(roles) if kind in tuple(of)]


def constants(roles: Roles) -> list[int]:
    """Return the indices of the factors of constant size."""
    return [index for index, kind in enumerate(kinds(roles)) if isinstance(kind, int)]


def is_plain(roles: Roles) -> bool:
    """Return whether no factor has entries beside those of the tokens."""
    return not any(factor.left or factor.right for factor in factors(roles))


def axis_of(roles: Roles, kind: str) -> int:
    """Return the axis that contains a factor of a kind."""
    return next(i for i, axis in enumerate(roles) if any(f.kind == kind for f in axis))


def skewed_last(roles: Roles) -> list[int]:
    """Return the axes of scores by distance: rows, further ones, queries, distances."""
    rank = {"B": 0, "Q": 2, "D": 3}
    return sorted(range(len(roles)), key=lambda i: rank.get(str(roles[i][0].kind), 1))


def renamed(roles: Roles, old: str, new: str) -> Roles:
    """Return roles in which factors of kind `old` have kind `new`."""
    return tuple(
        tuple(factor._replace(kind=new) if factor.kind == old else factor for factor in axis)
        for axis in roles
    )


def shape_of(roles: Roles, counts: Counts) -> list[Any]:
    """Return the sizes of axes, with -1 for a number of keys that the target decides."""
    shape = []
    for axis in roles:
        sizes = [factor.size(counts) for factor in axis]
        is_open = any(isinstance(size, int) and size == -1 for size in sizes)
        shape.append(-1 if is_open else sizes[0] if len(sizes) == 1 else math.prod(sizes))
    return shape


def split(x: Tensor, roles: Roles, counts: Counts) -> Tensor:
    """Give each factor an axis of its own."""
    if all(len(axis) == 1 for axis in roles):
        return x
    return x.reshape([factor.size(counts) for factor in factors(roles)])


def joined(x: Tensor, roles: Roles, counts: Counts) -> Tensor:
    """Join the factors of x [B, factors] to axes [B, axes]."""
    if all(len(axis) == 1 for axis in roles):
        return x
    return x.reshape([x.shape[0], *shape_of(roles, counts)])


def in_heads(x: Tensor, roles: Roles, order: Sequence[int], counts: Counts) -> Tensor:
    """Return x as [B, tokens, heads, entries].

    order: the order of the factors: rows, tokens, those of heads (perhaps none), entries.
    """
    y = split(x, roles, counts).permute(list(order))
    return y.flatten(2, -2) if len(order) > 3 else y.unsqueeze(2)


def in_axes(y: Tensor, roles: Roles, order: Sequence[int], counts: Counts) -> Tensor:
    """Return a result of `in_heads` with the axes of the original value."""
    flat = factors(roles)
    if y.dim() != len(flat):
        y = y.reshape([flat[i].size(counts) for i in order])
    y = y.permute([list(order).index(i) for i in range(len(order))])
    return y if len(flat) == len(roles) else y.reshape(shape_of(roles, counts))


def with_rows(roles: Roles) -> Roles:
    """Return roles with an axis of rows first, for a value that has each row alone."""
    alone = (tuple(Factor(1) if f.kind == "B" else f for f in axis) for axis in roles)
    return ((Factor("B"),), *alone)


def scores_of(x: Tensor, roles: Roles, counts: Counts) -> Tensor | None:
    """Return x as [B, heads, Q, K], or None if it lacks one of these axes."""
    flat = kinds(roles)
    if not {"B", "Q", "K"} <= set(flat):
        return None
    heads = constants(roles)
    many = [i for i in heads if flat[i] != 1] or heads[:1]
    single = [i for i in heads if i not in many]
    places = [flat.index(kind) for kind in ("Q", "K")]
    y = split(x, roles, counts).permute([flat.index("B"), *single, *many, *places])
    for _ in single:  # no reshape, which would write the number of keys into the graph
        y = y.squeeze(1)
    if y.dim() > 4:
        return y.flatten(1, -3)
    return y if y.dim() == 4 else y.unsqueeze(1)


def select(x: Tensor, roles: Roles, index: Mapping[str, Sequence[int]], counts: Counts) -> Tensor:
    """Take the rows, queries and keys index[kind] of every factor; other entries stay."""
    y = split(x, roles, counts)
    for axis, factor in enumerate(factors(roles)):
        if factor.kind in index:
            chosen, count = index[str(factor.kind)], counts[str(factor.kind)]
            kept = [*range(factor.left), *(factor.left + i for i in chosen)]
            kept += [factor.left + count + i for i in range(factor.right)]
            y = y.index_select(axis, torch.tensor(kept, dtype=torch.int64))
    new = {**counts, **{kind: len(chosen) for kind, chosen in index.items()}}
    return y.reshape(shape_of(roles, new))


def filled(
    x: Tensor,
    roles: Roles,
    counts: Counts,
    hidden: Tensor,
    fill: float,
    undefined: float = -math.inf,
) -> Tensor:
    """Write a number where keys are hidden, and NaN for queries whose keys hold at most undefined.
    hidden: [K], or [B,Q,K] in a call.
    """
    flat = factors(roles)
    own = ["K"] if hidden.dim() == 1 else ["B", "Q", "K"]
    query, key = (next(f for f in flat if f.kind == kind) for kind in ("Q", "K"))
    if hidden.dim() == 3 and (query.left or query.right):  # rows that see what any token sees
        every = hidden.all(1, keepdim=True)
        parts = (every.expand(-1, query.left, -1), hidden, every.expand(-1, query.right, -1))
        hidden = torch.cat(parts, 1)
    if key.left or key.right:
        hidden = torch.nn.functional.pad(hidden, (key.left, key.right))
    mask = hidden.permute([own.index(str(factor.kind)) for factor in flat if factor.kind in own])
    mask = mask[tuple(slice(None) if factor.kind in own else None for factor in flat)]
    least = torch.finfo(x.dtype).min if x.is_floating_point() else 0
    y = split(x, roles, counts).masked_fill(mask, max(fill, least))
    if undefined > -math.inf:
        largest = y.amax(kinds(roles).index("K"), keepdim=True)
        y = y.masked_fill(largest.le(undefined), math.nan)
    return y if y.dim() == x.dim() else y.reshape(shape_of(roles, counts))


def same(x: Tensor, y: Tensor, near: float = NEAR) -> bool:
    """Return whether two tensors are equal within `near` times the largest number of y, taken as
    at least LEAST, plus `near` times each number.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    finite = y[y.isfinite() & (y > HIDDEN)].abs()
    largest = max(LEAST, float(finite.max())) if finite.numel() else 1.0
    return torch.allclose(x, y, rtol=near, atol=near * largest, equal_nan=True)


def orders(roles: Roles, kind: str) -> list[tuple[int, ...]]:
    """Return the orders of the factors that begin with rows, then tokens of a kind."""
    flat = kinds(roles)
    if "B" not in flat or kind not in flat:
        return []
    found = itertools.permutations(constants(roles))
    return [(flat.index("B"), flat.index(kind), *order) for order in found if order]
