"""What depends on the length alone: tables of positions, or operators at pairs of positions."""

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from posenc_export import ops
from posenc_export.reading.axes import (
    FINE,
    Counts,
    Factor,
    Roles,
    factors,
    is_plain,
    joined,
    kinds,
    same,
    scores_of,
    select,
    shape_of,
    split,
    tokens,
    with_rows,
)
from posenc_export.reading.causality import same_at_every_length
from posenc_export.reading.operators import Operators
from posenc_export.reading.refused import Refused, refuse
from posenc_export.reading.steps import Cut
from posenc_export.reading.values import LIKE, Values, aten, inputs_of, packet, zero_scores

FILLED = {*LIKE, aten.full, aten.zeros, aten.ones, aten.empty, zero_scores}
MOST_PAIRS = 2**22  # numbers of a table of pairs of positions
COMPARED = 40  # length at which all pairs of positions are compared
FEW = 9  # tokens at which a filled value has entries, if it has any at some length
BLOCK = 256  # positions whose pairs with all others are compared at a time
# Of long ranges, positions whose pairs with all others are compared, and others that are drawn,
# whose pairs with those near them are.
FEW_PLACES, DRAWN, NEAR = 16, 64, 8


@dataclass(frozen=True)
class Number:
    """The same number in all calls, in a table of its own."""

    table: str


@dataclass(frozen=True)
class Fill:
    """One number in all entries. An axis over an open number of keys has size 1, to broadcast."""

    number: Any
    dtype: torch.dtype
    roles: Roles

    def of(self, counts: Counts) -> Tensor:
        """Return the value for numbers of rows and tokens."""
        sizes = shape_of(self.roles, counts)
        sizes = [1 if isinstance(size, int) and size < 0 else size for size in sizes]
        return torch.full(sizes, self.number, dtype=self.dtype)


@dataclass(frozen=True)
class ByPosition:
    """A row of a table [N,*] for each position; `axis`: the factor that runs over tokens."""

    table: str
    axis: int
    roles: Roles


@dataclass(frozen=True)
class ByPair:
    """An entry of a table for each pair of a query and a key.

    Attributes:
        table: [2N-1,*] by distance key - query, which begins at 1 - N, or [N,N,*] by pair.
        by_distance: whether it is by distance.
        axes: the factors that run over queries and keys.
    """

    table: str
    by_distance: bool
    axes: tuple[int, int]
    roles: Roles


@dataclass(frozen=True)
class Triangle:
    """tril or triu of the value of plan `inside`, by positions instead of indices."""

    inside: Any
    cut: Cut


@dataclass(frozen=True)
class Replay:
    """A plan that runs the operator itself on its inputs at the positions of a call."""

    node: Node
    inputs: tuple[Any, ...]
    roles: Roles


@dataclass(eq=False)
class Call:
    """The inputs of one call, and the values computed from them so far.

    Only semantic operations read key positions, so that a target may compute them from slots.

    Args:
        ops: the semantic operations, posenc_export.ops or stand-ins for a trace.
        positions: [B,S]; -1 for padding.
        key_positions: [B,T].
        last: the largest position.
        after: as in ops.attention_mask: 0 for causal models, otherwise -1.
        x, write_index, states, coordinates, memory: as in reading.read.CachedModule.
    """

    ops: Any
    positions: Tensor
    key_positions: Tensor
    last: int
    after: int = 0
    x: Tensor | None = None
    write_index: Tensor | None = None
    states: Sequence[Tensor] = ()
    coordinates: Tensor | None = None
    memory: Sequence[Tensor] = ()
    values: dict[Node, Any] = field(default_factory=dict)
    keys: dict[Node, Tensor] = field(default_factory=dict)
    cached: dict[Any, Tensor] = field(default_factory=dict)
    tails: dict[Any, Tensor] = field(default_factory=dict)
    lengths: dict[int, tuple[Tensor, bool]] = field(default_factory=dict)
    waves: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    _around: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, new = self.positions.shape
        self.counts: Counts = {"B": rows, "Q": new, "K": -1, "D": self.last + 1}
        self.counts["keys"] = self.key_positions.shape[1]
        if self.memory:
            self.counts["M"] = self.memory[0].shape[1]

    @functools.cached_property
    def places(self) -> Tensor:
        """Positions [B,S], 0 for padding."""
        return self.positions.clamp(min=0)

    @functools.cached_property
    def away(self) -> Tensor:
        """Key minus query position [B,S,T] int64."""
        distances: Tensor = self.ops.distances(self.positions, self.key_positions)
        return distances.to(torch.int64)[:, 0]

    @functools.cached_property
    def key_places(self) -> Tensor:
        """Positions of keys [B,T] int64, within the range."""
        return (self.away[:, 0] + self.positions[:, 0].unsqueeze(1)).clamp(0, self.last)

    @functools.cached_property
    def seen(self) -> Tensor:
        """Which keys a query may see [B,S,T] bool."""
        places = self.positions, self.key_positions
        mask = self.ops.attention_mask(*places, None, torch.empty(0), -1, self.after, 0)
        seen: Tensor = mask.squeeze(1).eq(0)
        return seen

    def around_padding(self, count: int) -> tuple[Tensor, Tensor]:
        """Return two indices. The first [B,n+S], into n earlier tokens followed by those of a call,
        puts padding in front of the tokens before the earlier ones. The second [B,n], into the
        result, selects the last n tokens. There is no padding between tokens.
        """
        if count not in self._around:
            columns, valid = torch.arange(self.counts["Q"] + count), self.positions.ge(0)
            first = valid.cumsum(1).eq(0).sum(1, keepdim=True)
            others = torch.where(columns < first + count, columns - first, columns)
            behind = torch.where(columns < first, columns + count, others)
            last = first + valid.sum(1, keepdim=True) + torch.arange(count)
            self._around[count] = behind, last
        return self._around[count]


Pairs = Callable[[Tensor, Tensor], Tensor]


class Lengths(torch.nn.Module):
    """Plans for values that depend on the length alone. Their tables are buffers.

    Args:
        values: the graph.
        operators: runs its operators in calls.
        finds: returns the roles that a value can have, and whether an operator acts on each pair
            alone (properties.Properties).
    """

    def __init__(self, values: Values, operators: Operators, finds: Any) -> None:
        super().__init__()
        self.graph, self.operators, self.finds = values, operators, finds
        self.count = values.max_positions
        self._plans: dict[Any, Any] = {}

    # Plans

    def plan(self, node: Node, roles: Roles) -> Any:
        """Return the plan that computes a value from positions. Refused: there is none."""
        if (node, roles) not in self._plans:
            self._plans[node, roles] = self._plan(node, roles)
        return self._plans[node, roles]

    def _plan(self, node: Node, roles: Roles) -> Any:
        count, of_tokens = self.count, tokens(roles)
        if packet(node) in FILLED:
            some = torch.cat([self.graph.at(node, length).flatten() for length in (2, FEW)])
            if not some.numel():
                return Fill(0, some.dtype, roles)
            if bool((some == some[0]).all()):
                return Fill(some[0].item(), some.dtype, roles)
        if not is_plain(roles):
            found = self._replayed(node, roles, of_tokens)
            return found or refuse(node, "has extra entries beside an axis of positions")
        if "M" in kinds(roles):
            return self._replayed(node, roles, of_tokens) or refuse(
                node, "counts tokens of an encoder"
            )
        if tokens(roles, ("D",)):
            return Number(self.table(self.graph.at(node, count)))
        if len(of_tokens) == 2:
            return self._replayed(node, roles, of_tokens) or self._table_of_pairs(node, roles)
        self._check_prefix(node, roles, (count, count - 3, count // 3, 5))
        value = self.graph.at(node, count)
        if not of_tokens:
            return Number(self.table(value))
        axis = kinds(roles).index(of_tokens[0])
        rows = split(value, roles, {"B": 1, "Q": count, "K": count}).movedim(axis, 0)
        return ByPosition(self.table(rows.contiguous()), axis, roles)

    def pairs(self, node: Node, roles: Roles) -> Any:
        """As `plan`, for a value that data is combined with. Pairs of positions get a table by
        distance if they depend on the distance alone.
        """
        if self.graph.reads_coordinates(node):
            refuse(node, "reads coordinates of tokens, and turns no heads by one for each pair")
        if len(tokens(roles)) < 2 or not is_plain(roles):
            return self.plan(node, roles)
        if (node, roles, "pairs") not in self._plans:
            by_pairs = self.plan(node, roles)
            found = self._by_distance(node, roles, by_pairs)
            self._plans[node, roles, "pairs"] = found or by_pairs
        return self._plans[node, roles, "pairs"]

    def _check_prefix(self, node: Node, roles: Roles, lengths: Sequence[int]) -> None:
        """Check that the value at a shorter length is the beginning of that at the longest length.
        Otherwise compare outputs of the module instead: differences of several values may cancel,
        as in xPos with exponents from the middle. All values are then of the longest length.
        """
        longest, *others = lengths
        whole = self.graph.at(node, longest)
        counts: Counts = {"B": 1, "Q": longest, "K": longest}
        for length in others:
            expected = self.graph.at(node, length)
            got = select(whole, roles, {"Q": range(length), "K": range(length)}, counts)
            if not same(got, expected, FINE) and not self._same_output:
                error = (got.to(expected.dtype) - expected).abs().nan_to_num().max().item()
                refuse(
                    node,
                    "depends on the length, not on positions alone: at lengths "
                    f"{longest} and {length} it differs by {error:.1e}",
                )

    @functools.cached_property
    def _same_output(self) -> bool:
        return same_at_every_length(self.graph.capture)

    def table(self, value: Tensor) -> str:
        """Register a table, or find an equal one."""
        for name, known in self.named_buffers():
            if known.dtype == value.dtype and torch.equal(known, value):
                return name
        name = f"table{len(list(self.buffers()))}"
        self.register_buffer(name, value.detach().clone().contiguous())
        return name

    def _replayed(self, node: Node, roles: Roles, of_tokens: list[Any]) -> Any:
        """Return a plan that runs the operator at pairs of positions, or None if it does not act
        on each pair alone.
        """
        inputs = inputs_of(node)
        if cut := Cut.of(node, roles):
            return Triangle(self.plan(inputs[0], roles), cut)
        ways = [
            self.finds.readings(other.meta["val"], of_tokens)
            if self.graph.kind[other] == "length"
            else [None]
            for other in inputs
        ]
        for reads in itertools.product(*ways):
            if not self.finds.acts_on_each(node, reads, roles):
                continue
            try:
                plans = tuple(
                    None if read is None else self.plan(other, read)
                    for other, read in zip(inputs, reads, strict=True)
                )
            except Refused:
                continue
            return Replay(node, plans, roles)
        return None

    def _table_of_pairs(self, node: Node, roles: Roles) -> ByPair:
        count, rest = self.count, math.prod(k for k in kinds(roles) if isinstance(k, int))
        if count * count * rest > MOST_PAIRS:
            refuse(
                node,
                f"needs a table of {count} x {count} pairs of positions, of at most {MOST_PAIRS:,} "
                "numbers; compute it from torch.arange in forward",
            )
        self._check_prefix(node, roles, (count, count - 3, 5))
        axes = kinds(roles).index("Q"), kinds(roles).index("K")
        value = split(self.graph.at(node, count), roles, {"B": 1, "Q": count, "K": count})
        return ByPair(self.table(value.movedim(axes, (0, 1)).contiguous()), False, axes, roles)

    def _by_distance(self, node: Node, roles: Roles, by_pairs: Any) -> ByPair | None:
        count, length = self.count, min(self.count, COMPARED)
        self._check_prefix(node, roles, (length, length // 2, 5))
        axes = kinds(roles).index("Q"), kinds(roles).index("K")
        value = self.graph.at(node, length)
        first = torch.zeros(1, 1, dtype=torch.int64)
        if not self.value(by_pairs, self._call(first, first))[1]:
            return None
        square = split(value, roles, {"B": 1, "Q": length, "K": length}).movedim(axes, (0, 1))
        if not torch.equal(square[1:, 1:], square[:-1, :-1]):
            return None

        def at(i: Tensor, j: Tensor) -> Tensor:
            counts, of_rows = {"B": 1, "Q": i.shape[1], "K": j.shape[1]}, ((Factor(1),), *roles)
            rows = self.value(by_pairs, self._call(i, j))[0].expand(shape_of(of_rows, counts))
            return split(rows, of_rows, counts)[0].movedim(axes, (0, 1))

        all_positions = torch.arange(count)[None]
        before = at(all_positions[:, -1:], all_positions)[0]
        table = torch.cat((before, at(all_positions[:, :1], all_positions)[0, 1:]))
        few = count * table.numel() <= 2 * MOST_PAIRS
        for i, j in compared_pairs(count, few or isinstance(by_pairs, ByPair)):
            if not torch.equal(table[j[0] - i[0][:, None] + count - 1], at(i, j)):
                return None
        return ByPair(self.table(table), True, axes, roles)

    def _call(self, positions: Tensor, key_positions: Tensor) -> Call:
        return Call(ops, positions, key_positions, self.count - 1)

    # Values in a call

    def value(self, plan: Any, call: Call) -> tuple[Tensor, bool]:
        """Return a value at the positions of a call, and whether it has an axis of rows first."""
        if id(plan) not in call.lengths:
            call.lengths[id(plan)] = self._value(plan, call)
        return call.lengths[id(plan)]

    def _value(self, plan: Any, call: Call) -> tuple[Tensor, bool]:
        counts = {**call.counts, "B": 1}
        if isinstance(plan, Fill):
            return plan.of(counts), False
        if isinstance(plan, Number):
            return self.get_buffer(plan.table), False
        if isinstance(plan, ByPosition):
            table = self.get_buffer(plan.table)
            places = call.places if tokens(plan.roles) == ["Q"] else call.key_places
            rows = places if self._is_range(plan.table) else table[places]
            return joined(rows.movedim(1, plan.axis + 1), plan.roles, counts), True
        if isinstance(plan, ByPair):
            table = self.get_buffer(plan.table)
            if plan.by_distance:
                rows = table[(call.away + call.last).clamp(0, 2 * call.last)]
            else:
                rows = table[call.places.unsqueeze(2), call.key_places.unsqueeze(1)]
            rows = rows.movedim((1, 2), (plan.axes[0] + 1, plan.axes[1] + 1))
            return joined(rows, plan.roles, counts), True
        if isinstance(plan, Triangle):
            x, has_rows = self.value(plan.inside, call)
            return triangle(x if has_rows else x.unsqueeze(0), plan.cut, call), True
        return self._replay(plan, call, counts)

    @functools.cache  # noqa: B019 - lives as long as the tables
    def _is_range(self, name: str) -> bool:
        table = self.get_buffer(name)
        return table.dim() == 1 and torch.equal(table, torch.arange(len(table)))

    def _replay(self, plan: Replay, call: Call, counts: Counts) -> tuple[Tensor, bool]:
        found = [
            (self.operators.given(other), False) if inner is None else self.value(inner, call)
            for inner, other in zip(plan.inputs, inputs_of(plan.node), strict=True)
        ]
        inputs, apart = [x for x, _ in found], [has_rows for _, has_rows in found]
        of = (counts, "Q", plan.roles)
        if not any(apart):
            return self.graph.call(plan.node, inputs, *of), False
        return self.operators.by_row(plan.node, inputs, apart, *of), True

    def of_coordinates(self, table: str, of_axis: str, call: Call) -> Tensor:
        """Return a table [N,r/2] at the coordinate of each pair [B,S,1,r/2] (Rotated.of_axis)."""
        if (table, of_axis) not in call.waves:
            assert call.coordinates is not None
            rows = call.coordinates.clamp(min=0)
            each = torch.nn.functional.embedding(rows, self.get_buffer(table))
            chosen, axes = each[0], self.get_buffer(of_axis)
            for axis in range(1, len(axes)):
                chosen = torch.where(axes[axis], each[axis], chosen)
            call.waves[table, of_axis] = chosen.unsqueeze(2)
        return call.waves[table, of_axis]

    def scores(self, plan: Any, roles: Roles, call: Call) -> Tensor:
        """Return a value of pairs as [B, heads, Q, K]."""
        x, has_rows = self.value(plan, call)
        if not has_rows:
            x = x.unsqueeze(0).expand(call.counts["B"], *x.shape)
        scores = scores_of(x, with_rows(roles), call.counts)
        assert scores is not None
        return scores


def triangle(x: Tensor, cut: Cut, call: Call) -> Tensor:
    """Keep the entries of x [B,..,Q,K] or [B,..,K,Q] in a triangle by positions."""
    query, key = (f for kind in "QK" for f in factors(cut.roles) if f.kind == kind)
    away = call.away  # column minus row
    if query.left or key.left:
        columns, rows = (
            torch.cat((torch.arange(-n, 0).expand(places.shape[0], -1), places), 1)
            for n, places in ((key.left, call.key_places), (query.left, call.places))
        )
        away = columns[:, None] - rows[:, :, None] + key.left - query.left
    if tokens(cut.roles) != ["Q", "K"]:
        away = -away.transpose(1, 2)
    kept = away.le(cut.shift) if cut.lower else away.ge(cut.shift)
    kept = kept[(slice(None), *[None] * (x.dim() - 3))]
    if x.dtype == torch.bool:
        return kept & x
    return torch.where(kept, x, torch.zeros((), dtype=x.dtype))


def compared_pairs(count: int, every: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield positions of queries [1,n] and keys [1,m] whose pairs are compared: all pairs, or those
    of some tokens with all tokens, which show any query or key that differs, and with near ones.
    """
    places = torch.arange(count)[None]
    if every:
        yield from ((some, places) for some in places.split(BLOCK, 1))
        return
    generator = torch.Generator().manual_seed(6)
    spread = torch.arange(FEW_PLACES) + torch.rand(FEW_PLACES, generator=generator)
    some = (spread * count / FEW_PLACES).long()[None]
    drawn = torch.randint(count, (DRAWN, 1), generator=generator)
    near = (drawn + torch.arange(-NEAR, NEAR + 1)).clamp(0, count - 1).reshape(1, -1)
    yield from ((some, places), (places, some), (near, near))
