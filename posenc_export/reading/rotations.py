"""Rotations of heads by position, recognized by their numbers, in whatever code.

The operators between two values of heads are run on heads whose pairs are (1, 0). The results are
cos and sin of each position, as the module computes them. The operators are a rotation if they give
the same as ops.rotate_pairs with these tables for other heads.
"""

import itertools
from collections import ChainMap
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from posenc_export import ops
from posenc_export.reading.axes import FINE, Counts, in_axes, in_heads, orders, same, select, tokens
from posenc_export.reading.lengths import Lengths
from posenc_export.reading.properties import Properties
from posenc_export.reading.refused import Refused
from posenc_export.reading.steps import Each, Item, Rotated
from posenc_export.reading.values import LAYOUT, aten, inputs_of, packet

LARGEST = 40  # operators of a rotation
CHUNK = 4096  # positions at a time
FAR = 1e3  # factor on numbers near 1, at which a bound such as a clamp would show
DRAWN = 64  # tokens whose coordinates show which coordinate turns a pair
JOINS = LAYOUT | {aten.cat, aten.slice_scatter, aten.copy}
PAIRS = ((False, False), (True, False), (True, True))  # interleaved, and apart after it
LINEAR = 1e-6  # largest error of cos and sin from angles that are proportional to the position


class Region(NamedTuple):
    """Operators from the heads `root` to the heads that the last of `nodes` gives. Orders list the
    factors of both as [B,S,H,D].
    """

    root: Node
    root_order: tuple[int, ...]
    nodes: list[Node]
    order: tuple[int, ...]


class Form(NamedTuple):
    """The pairs that are turned, of the first `size` entries of a head. apart: whether turned pairs
    are halves of these entries, though they were interleaved before.
    """

    size: int
    interleaved: bool
    apart: bool = False

    @property
    def after(self) -> "Form":
        """The pairs as they are after the rotation."""
        return Form(self.size, self.interleaved and not self.apart)

    def before(self, x: Tensor) -> Tensor:
        """Return heads x [..,D] with pairs as they are after the rotation."""
        rest = (x[..., self.size :],) if self.size < x.size(-1) else ()
        return torch.cat((*self.halves(x), *rest), -1) if self.apart else x

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second entries of all pairs of x [..,D]."""
        x = x[..., : self.size]
        if self.interleaved:
            return x[..., 0::2], x[..., 1::2]
        first, second = x.chunk(2, dim=-1)
        return first, second


class Rotations:
    """Recognizes rotations in a graph whose steps are being found.

    Args:
        properties: the steps found so far.
        lengths: holds the tables.
    """

    def __init__(self, properties: Properties, lengths: Lengths) -> None:
        self.properties, self.lengths, self.values = properties, lengths, properties.values
        self.places = {node: place for place, node in enumerate(self.values.nodes)}

    def recognize(self, node: Node) -> None:
        """Give the step Rotated to heads, to a value before them, or to the parts that they join,
        if it is a rotation.
        """
        left = [node]
        while left:
            node = left.pop()
            if not self._recognizes(node) and packet(node) in JOINS:
                left += self.values.data_of(node)

    def _recognizes(self, node: Node) -> bool:
        """Give a value, or one before it, the step Rotated. Return whether one is a rotation."""
        for end in (node, *(root for root, _ in self._regions(node))):
            for root, nodes in self._regions(end):
                for root_order, order in itertools.product(self._orders(root), self._orders(end)):
                    region = Region(root, root_order, nodes, order)
                    form = self._form(region)
                    step = form and self._step(region, form)
                    if step:
                        self.properties.steps[end] = step
                        return True
        return False

    def _orders(self, node: Node) -> list[tuple[int, ...]]:
        """Return the orders of the factors of heads as [B,S,H,D]."""
        found = orders(self.properties.steps[node].roles, "Q")
        return [order for order in found if len(order) > 3]

    def _regions(self, node: Node) -> Iterator[tuple[Node, list[Node]]]:
        """Yield earlier values of the same size from which all of `node` is computed, the nearest
        first, and the operators between, which act on each token alone.
        """
        steps, of = self.properties.steps, self.values.of
        nodes: list[Node] = []
        ends = {node}
        while ends and len(nodes) < LARGEST:
            last = max(ends, key=self.places.__getitem__)
            step = steps.get(last)
            several = isinstance(step, Each) and isinstance(step.roles, list)
            if not several and (step is None or tokens(step.roles) != ["Q"]):
                return
            if nodes and len(ends) == 1 and not several and of[last].numel() == of[node].numel():
                yield last, nodes[::-1]
            if not isinstance(step, (Each, Item)) or self._projects(last):
                return
            nodes.append(last)
            ends = ends - {last} | set(self.values.data_of(last))

    def _projects(self, node: Node) -> bool:
        """Return whether an operator reads a matrix of the module."""
        weights = (self.values.of.get(n) for n in inputs_of(node) if self.values.kind[n] == "const")
        return any(isinstance(weight, Tensor) and weight.dim() > 1 for weight in weights)

    def _run(self, region: Region, x: Tensor, lengths: Mapping[Node, Tensor]) -> Tensor:
        """Return the result of a region for heads x [B,S,H,D].

        lengths: values that depend on the length alone, for these tokens.
        """
        counts: Counts = {"B": x.shape[0], "Q": x.shape[1], "K": x.shape[1]}
        steps, root, last = self.properties.steps, region.root, region.nodes[-1]
        x = in_axes(x, steps[root].roles, region.root_order, counts)
        given = ChainMap(dict(lengths), self.values.of).get
        y = self.properties.run_region(region.nodes, root, x, given)
        return in_heads(y, steps[last].roles, region.order, counts)

    def _form(self, region: Region) -> Form | None:
        """Return the pairs that a region turns on the example; None if it is no rotation."""
        of, steps, counts = self.values.of, self.properties.steps, self.values.counts
        root, last = region.root, region.nodes[-1]
        x = in_heads(of[root], steps[root].roles, region.root_order, counts)
        y = in_heads(of[last], steps[last].roles, region.order, counts)
        if x.shape != y.shape or not x.is_floating_point():
            return None
        some = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x.dtype)
        turned = self._run(region, some, {})
        moved = (turned != some).flatten(0, 2).any(0).nonzero()
        if turned.dtype != torch.float32 or not len(moved):
            return None
        end = int(moved.max()) + 1
        sizes = {x.shape[3], end + end % 2}
        for size, pairs in itertools.product(sizes, PAIRS):
            if size % 2 or size > x.shape[3]:
                continue
            form = Form(size, *pairs)
            cos, sin = (wave[:, :, None] for wave in self._waves(region, form, some.shape[:2], {}))
            expected = ops.apply_rotation(form.before(some), cos, sin, form.after.interleaved)
            if sin.any() and same(expected, turned, FINE):  # a factor alone turns nothing
                return form if same(self._run(region, FAR * some, {}), FAR * turned, FINE) else None
        return None

    def _waves(
        self, region: Region, form: Form, sizes: Sequence[int], lengths: Mapping[Node, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B,S,r/2] of the first head. sizes: B and S."""
        of, roles = self.values.of[region.root], self.properties.steps[region.root].roles
        heads = in_heads(of, roles, region.root_order, self.values.counts).shape[2:]
        x = torch.zeros(*sizes, *heads)
        form.halves(x)[0].fill_(1)
        cos, sin = form.after.halves(self._run(region, x, lengths)[:, :, 0])
        return cos, sin

    def _step(self, region: Region, form: Form) -> Rotated | None:
        """Return the step of a region, or None if no table has its cos and sin."""
        tables = self._tables(region, form)
        axes = self._axes(region, form, *tables) if tables else None
        if not tables or axes is None:
            return None
        roles = self.properties.steps[region.nodes[-1]].roles
        cos, sin = (self.lengths.table(table) for table in tables)
        of_axis = self.lengths.table(axes) if len(axes) else ""
        of_root = region.root, region.root_order
        return Rotated(roles, *of_root, region.order, cos, sin, form, _is_linear(*tables), of_axis)

    def _tables(self, region: Region, form: Form) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin [N,r/2] of all positions; None if they depend on the length."""
        read = self._of_length(region)
        try:
            for other, roles in read.items():
                self.lengths.plan(other, roles)  # compares lengths
        except Refused:
            return None
        count, parts = self.values.max_positions, []
        whole = {other: self.values.at(other, count) for other in read}
        for start in range(0, count, CHUNK):
            some = range(start, min(start + CHUNK, count))
            counts: Counts = {"B": 1, "Q": count, "K": count}
            lengths = {
                other: select(whole[other], roles, {"Q": some}, counts)
                for other, roles in read.items()
            }
            parts.append(self._waves(region, form, (1, len(some)), lengths))
        cos, sin = (torch.cat(part, 1)[0] for part in zip(*parts, strict=True))
        return cos, sin

    def _axes(self, region: Region, form: Form, cos: Tensor, sin: Tensor) -> Tensor | None:
        """Return whether each coordinate turns each pair [A,r/2]; an empty tensor if the position
        turns all pairs. None if a pair is turned by anything else.
        """
        read, capture = self._of_length(region), self.values.capture
        if not capture.axes or not any(map(self.values.reads_coordinates, read)):
            return torch.empty(0)
        (drawn,) = capture.drawn(1, DRAWN)
        known: dict[Node, Any] = {capture.positions: drawn}  # type: ignore[dict-item]
        lengths = {other: self.values.at(other, DRAWN, known) for other in read}
        waves = zip((cos, sin), self._waves(region, form, (1, DRAWN), lengths), strict=True)
        errors = sum((table[drawn[:, 0]] - wave).abs().amax(1) for table, wave in waves)
        least, axis = errors.min(0)  # type: ignore[union-attr]
        turned = axis == torch.arange(len(drawn))[:, None]
        return turned if bool((least <= FINE * cos.abs().max()).all()) else None

    def _of_length(self, region: Region) -> dict[Node, Any]:
        """Return the roles of values that a region reads and that depend on the length alone."""
        found: dict[Node, Any] = {}
        for node in region.nodes:
            step = self.properties.steps[node]
            reads = step.reads if isinstance(step, Each) else ()  # Item reads no numbers
            for other, read in zip(inputs_of(node), reads, strict=bool(reads)):
                if self.values.kind[other] == "length":
                    found[other] = read
        return found


def _is_linear(cos: Tensor, sin: Tensor) -> bool:
    """Return whether the angles of tables of cosines and sines [N,r/2] grow by the same amount from
    each position to the next.
    """
    waves = torch.complex(cos.double(), sin.double())
    if len(waves) < 2 or not waves.abs().sub(waves[0].abs()).abs().max() <= LINEAR:
        return False
    turn, at = torch.zeros_like(waves[0].real), 1
    while at < len(waves):  # larger positions give the turn per position more exactly
        expected = torch.polar(torch.ones_like(turn), turn * at)
        turn = turn + (waves[at] * waves[0].conj() * expected.conj()).angle() / at
        at *= 2
    places = torch.arange(len(waves), dtype=torch.float64)[:, None]
    exact = waves[0] * torch.polar(torch.ones(1, dtype=torch.float64), places * turn)
    return bool((exact - waves).abs().max() <= LINEAR)
