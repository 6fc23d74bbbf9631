"""What each operator of a graph does to rows and tokens, decided by numbers.

Three properties are tried on the values of one run:

- An operator acts on each token: op(inputs[rows, I, J]) = op(inputs)[rows, I, J] for lists of rows,
  queries I and keys J.
- It reduces keys: op(inputs[J]) = op(inputs with 0 or -inf at all other keys), for any list of keys
  J, or for those that keep the order of the keys, which is that of slots.
- A region of operators reads a window: an output at a token needs the last tokens before it only.
"""

import itertools
import math
import operator
from collections import ChainMap
from typing import Any, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from posenc_export.reading.axes import (
    HIDDEN,
    OF_TOKENS,
    Axis,
    Counts,
    Factor,
    Roles,
    axis_of,
    factors,
    filled,
    in_heads,
    is_plain,
    kinds,
    orders,
    renamed,
    same,
    select,
    skewed_last,
    tokens,
)
from posenc_export.reading.recurrent_groups import RUN, operands
from posenc_export.reading.refused import refuse
from posenc_export.reading.steps import (
    Cut,
    Each,
    Given,
    Item,
    OfMemory,
    Open,
    OverKeys,
    Reads,
    Recurrent,
    Running,
    Skew,
    Step,
    Window,
)
from posenc_export.reading.values import Values, aten, inputs_of, running_max
from posenc_export.reading.windows import FAILED, reach_of

RUNNING = {
    aten.cumsum.default: "sum",
    aten.cumprod.default: "product",
    aten.logcumsumexp.default: "logsumexp",
    running_max: "max",
}
MOST_EXTRA = 64  # entries beside tokens on one axis
SIZES = ((3, 20), (2, 7), (5, 11), (7, 30))  # rows and tokens for which sizes are compared
POWERS = {0: ("",), 1: ("K", "Q"), 2: ("QK",)}  # of the number of tokens in a size
MIXES = "mixes tokens or rows, and is no reduction of keys, window or sum that can be continued"


class Properties:
    """The steps of a graph.

    Args:
        values: the graph, with the values of one run.
        causal: whether later tokens change nothing.

    Attributes:
        steps: by node, for nodes that depend on the tokens.
    """

    def __init__(self, values: Values, causal: bool = True) -> None:
        self.values, self.causal = values, causal
        self.counts = values.counts
        self.turned = ["K", "Q"]  # order of two axes of tokens that `_options` tries last
        self.steps: dict[Node, Step] = {}
        self._axes: dict[Any, list[Axis]] = {}
        self.indices = list(self._indices())
        # For running sums, keys keep their order.
        self.in_order = [{**index, "K": sorted(index["K"])} for index in self.indices]

    def find(self, node: Node) -> Step:
        """Return the step of a node whose inputs have steps. Refused: it has no property."""
        values, inputs, value = self.values, inputs_of(node), node.meta["val"]
        if node is values.input or node in values.capture.memory:
            further = [(Factor(size),) for size in value.shape[2:]]
            return Given(
                ((Factor("B"),), (Factor("Q" if node is values.input else "M"),), *further)
            )
        if node in values.memory and (part := self._part_of_memory(node)):
            return part
        if node.target is operator.getitem:
            return Item(self.steps[inputs[0]].roles[node.args[1]])
        if node.target is RUN:
            return self._recurrent(node)
        if isinstance(value, (tuple, list)):
            return self._several(node)
        if any(isinstance(self.steps[other], Open) for other in values.data_of(node)):
            return self._window(node)
        own: Any = self.steps[values.data_of(node)[0]].roles
        return (
            (None if isinstance(own, list) else Cut.of(node, own))
            or self._each_or_keys(node)
            or self._of_turned(node)
            or self._running(node)
            or self._window(node)
        )

    def _part_of_memory(self, node: Node) -> Step | None:
        """Return the step of a value that is a slice of the outputs of an encoder, in heads; None
        for a value that is computed from them.
        """
        memory, value = self.values.of[self.values.capture.memory[0]], self.values.of[node]
        for roles in self.readings(node.meta["val"], ()):
            for order in orders(roles, "M"):
                x = in_heads(value, roles, order, self.counts)
                flat = x.flatten(2)
                for begin in range(memory.shape[2] - flat.shape[2] + 1):
                    if torch.equal(memory[..., begin : begin + flat.shape[2]], flat):
                        return OfMemory(roles, order, begin, *x.shape[2:])
        return None

    def _recurrent(self, node: Node) -> Step:
        """Return the step of a recurrence whose values have plain axes of rows and tokens."""
        for other in inputs_of(node):
            if self.values.kind[other] == "const":  # decays of all tokens
                continue
            roles: Any = self.steps[other].roles if other in self.steps else []
            plain = not isinstance(roles, list) and is_plain(roles)
            if not (self.causal and plain and kinds(roles[:2]) == ["B", "Q"] == kinds(roles)[:2]):
                refuse(node, MIXES)
            if tokens(roles) != ["Q"]:
                refuse(node, MIXES)
        given: Any = [self.values.of[of] if isinstance(of, Node) else of for of in node.args]
        _, k, v, _, _ = operands(*given)
        heads, size = v.shape[2:]
        own = ((Factor("B"),), (Factor("Q"),), (Factor(heads),), (Factor(size),))
        return Recurrent(own, (heads, k.shape[3], size))

    def _each_or_keys(self, node: Node) -> Step | None:
        options = self._options(node)
        has_sizes = any(self.values.kind[other] == "size" for other in inputs_of(node))
        for reads, roles in options:
            for sizes in ("Q", "K") if has_sizes else ("Q",):
                if self._keeps_tokens(node, reads, roles) and self.acts_on_each(
                    node, reads, roles, sizes
                ):
                    return Each(roles, reads, sizes)
        for reads, roles in options:
            for fill in (0.0, float("-inf")):
                if self._reduces_keys(node, reads, roles, fill):
                    return OverKeys(roles, reads, fill)
        return None

    def _keeps_tokens(self, node: Node, reads: Reads, roles: Roles) -> bool:
        """Return whether an output has the token axes of its data. Without, numbers show little
        if tokens of the example are alike: the maximum of a mask equals any of its entries.
        """
        of_data = zip(inputs_of(node), reads, strict=True)
        kept = _tokens_of(tuple(r for other, r in of_data if self.values.kind[other] == "data"))
        return kept <= set(tokens(roles, OF_TOKENS))

    def _of_turned(self, node: Node) -> Step | None:
        """Return the step of a node that reads one of its inputs with queries and keys exchanged.
        Pairs that are computed from one token each, such as rows of a table for a key at the
        distance of each query, may be read either way.
        """
        before = dict(self.steps)
        of_pairs = [n for n in self.values.data_of(node) if self._is_of_pairs(self.steps[n])]
        for other in sorted(of_pairs, key=lambda n: tokens(before[n].roles) != self.turned):
            pairs = self._pairs_with(other)
            self.turned.reverse()
            turned = [self._read_again(one) for one in pairs]
            self.turned.reverse()
            if pairs and all(turned) and (step := self._each_or_keys(node)):
                return step
            self.steps.update(before)
        return None

    def _read_again(self, node: Node) -> bool:
        step = self._each_or_keys(node)
        self.steps[node] = step or self.steps[node]
        return step is not None

    def _pairs_with(self, node: Node) -> list[Node]:
        """Return the nodes of pairs of tokens that are exchanged together with a node, in order;
        none if one of them, or a reader, does not act on each pair alone.
        """
        found, left = set[Node](), [node]
        while left:
            one = left.pop()
            if one in found:
                continue
            if not isinstance(self.steps[one], Each) or not self._is_of_pairs(self.steps[one]):
                return []
            found.add(one)
            left += [n for n in self.values.data_of(one) if self._is_of_pairs(self.steps[n])]
            left += self.steps.keys() & one.users.keys()
        return [one for one in self.values.nodes if one in found]

    def _is_of_pairs(self, step: Step) -> bool:
        return not isinstance(step.roles, list) and set(tokens(step.roles)) == {"Q", "K"}

    def _options(self, node: Node) -> list[tuple[Reads, Roles]]:
        """Return the roles in which a node may read its inputs, and those of its output. First come
        those with keys after queries, no padding that inputs lack, and few values read at keys.
        """
        inputs = inputs_of(node)
        added = {"Q"} if node.target is aten.expand.default else set()  # values of keys, repeated

        def cost(option: tuple[Reads, Roles]) -> tuple[bool, bool, int]:
            changed = sum(
                read is not self.steps[other].roles
                for other, read in zip(inputs, option[0], strict=True)
                if self.values.kind[other] == "data"
            )
            read = {factor for roles in option[0] if roles for factor in factors(roles)}
            of_tokens = {factor for factor in factors(option[1]) if factor.kind in OF_TOKENS}
            return tokens(option[1]) == self.turned, not of_tokens <= read, changed

        options = [
            (reads, roles)
            for reads in itertools.product(*(self._ways(other) for other in inputs))
            for roles in self.readings(node.meta["val"], _tokens_of(reads) | added)
        ]
        return sorted(options, key=cost)

    def _ways(self, node: Node) -> list[Any]:
        """Return the roles in which a value can be read."""
        kind = self.values.kind[node]
        if kind == "data":
            own = self.steps[node].roles
            if not isinstance(own, list) and tokens(own, OF_TOKENS) == ["Q"]:
                return [own, renamed(own, "Q", "K")]
            return [own]
        if kind == "length":
            ends = self.readings(node.meta["val"], "D") if self._from_the_end(node) else []
            return [*ends, *self.readings(node.meta["val"], "QK")]
        return [None]

    def _from_the_end(self, node: Node) -> bool:
        """Return whether a shorter value is the end of a longer one, not its beginning. Its axis
        then runs over distances from the last token.
        """
        of_tokens = [(Factor("Q"),) in self._axis(size) for size in node.meta["val"].shape]
        if of_tokens.count(True) != 1:
            return False
        axis = of_tokens.index(True)
        long, short = self.values.at(node, 12), self.values.at(node, 7)
        is_end = torch.equal(long.narrow(axis, 5, 7), short)
        return is_end and not torch.equal(long.narrow(axis, 0, 7), short)

    # Roles that a symbolic shape allows

    def readings(
        self, value: Any, allowed: Collection[Any], whole: str | None = None
    ) -> list[Roles]:
        """Return the roles that a value can have by its symbolic shape.

        Args:
            allowed: kinds of its factors over tokens, each at most once.
            whole: kinds that it must have, None for any.
        """
        found = []
        for roles in itertools.product(*(self._axis(size) for size in value.shape)):
            own = tokens(roles, OF_TOKENS)
            if len(set(own)) == len(own) and set(own) <= set(allowed):
                if whole is None or set(own) == set(whole):
                    found.append(roles)
        return found

    def _axis(self, size: Any) -> list[Axis]:
        """Return the products of factors that an axis of a symbolic size can be. Sizes are compared
        by their values, since symbolic forms are not always simplified.
        """
        if not isinstance(size, torch.SymInt):
            return [(Factor(int(size)),)]
        expression = size.node.expr
        if expression == self.values.capture.sources:
            return [(Factor("M"),)]
        if expression not in self._axes:
            self._axes[expression] = self._products(size)
        return self._axes[expression]

    def _products(self, size: Any) -> list[Axis]:
        at = [self.values.size(size, {"B": rows, "Q": length}) for rows, length in SIZES]
        extra = {number - length for number, (_, length) in zip(at, SIZES, strict=True)}
        if len(extra) == 1 and 0 <= (count := extra.pop()) <= MOST_EXTRA:
            lefts = sorted(range(count + 1), key=lambda left: min(left, count - left))
            of = "KQD"[: 2 if count else 3]
            return [(Factor(kind, left, count - left),) for left in lefts for kind in of]
        found: list[Axis] = []
        for of_rows, (power, roles) in itertools.product((0, 1), POWERS.items()):
            units = [rows**of_rows * length**power for rows, length in SIZES]
            constant = {number / unit for number, unit in zip(at, units, strict=True)}
            if len(constant) == 1 and (part := constant.pop()).is_integer():
                parts = [Factor(int(part))] if part != 1 or not of_rows + power else []
                parts += [Factor("B")] * of_rows
                for kinds_of in roles:
                    found += itertools.permutations([*parts, *map(Factor, kinds_of)])
        return found

    # The first property

    def _indices(self) -> Iterator[dict[str, list[int]]]:
        """Yield lists of rows, queries and keys, of other lengths and orders than the whole. Keys
        contain those of the queries, since a softmax over masked keys alone is undefined.
        """
        length = self.counts["Q"]
        generator = torch.Generator().manual_seed(3)
        sizes = (([2, 0], length // 2, length - 3), ([1, 2, 0], length // 3, length // 2))
        for rows, queries, keys in sizes:
            order = torch.randperm(length, generator=generator)
            chosen = order[:keys][torch.randperm(keys, generator=generator)]
            yield {"B": rows, "Q": order[:queries].tolist(), "K": chosen.tolist()}

    def _chosen(
        self,
        of: Mapping[Node, Any],
        inputs: Sequence[Node],
        reads: Reads,
        index: Mapping[str, list[int]],
    ) -> list[Any]:
        return [
            of.get(other) if read is None else select(of[other], read, index, self.counts)
            for other, read in zip(inputs, reads, strict=True)
        ]

    def acts_on_each(
        self,
        node: Node,
        reads: Reads,
        roles: Roles,
        sizes: str = "Q",
        indices: list[dict[str, list[int]]] | None = None,
        part: int | None = None,
    ) -> bool:
        """Return whether an operator commutes with the choice of rows, queries and keys. part: of
        an operator with several outputs, the one that is compared.
        """
        if indices is None:
            indices = [*self.indices, *self._beyond(reads)]
        runs = itertools.product(self._runs(node), indices)
        try:
            for (of, whole), index in runs:
                new = {**self.counts, **{kind: len(chosen) for kind, chosen in index.items()}}
                inputs = self._chosen(of, inputs_of(node), reads, index)
                got = self.values.call(node, inputs, new, sizes, roles)
                got, whole = (got, whole) if part is None else (got[part], whole[part])
                if not same(got, select(whole, roles, index, self.counts)):
                    return False
        except FAILED:
            return False
        return True

    def _beyond(self, reads: Reads) -> Iterator[dict[str, list[int]]]:
        """Yield a longer list of tokens for values with padding beside the tokens. In the example,
        padding may be longer than the tokens, and hide a shift by as many tokens.
        """
        extra = max((f.left + f.right for read in reads if read for f in factors(read)), default=0)
        if extra:
            some = [i % self.counts["Q"] for i in range(2 * extra + self.counts["Q"])]
            yield {"B": [0], "Q": some, "K": some}

    def _runs(self, node: Node) -> Iterator[tuple[Mapping[Node, Any], Any]]:
        """Yield values of the inputs of a node, and its output for them."""
        values = self.values
        yield values.of, values.of[node]
        if not values.varied.keys().isdisjoint(inputs_of(node)):
            of = ChainMap(values.varied, values.of)
            yield of, values.call(node, [of.get(other) for other in inputs_of(node)], self.counts)

    # The second property

    def _reduces_keys(self, node: Node, reads: Reads, roles: Roles, fill: float) -> bool:
        """Return whether keys that hold `fill` in inputs with queries and keys have no effect."""
        if not any(read and set(tokens(read)) == {"Q", "K"} for read in reads):
            return False
        try:
            runs = [of for of, _ in self._runs(node)]
            return any(
                all(
                    self._ignores(of, node, reads, roles, fill, index)
                    for of, index in itertools.product(runs, indices)
                )
                for indices in (self.indices, self.in_order)
            )
        except FAILED:
            return False

    def _ignores(
        self,
        of: Mapping[Node, Any],
        node: Node,
        reads: Reads,
        roles: Roles,
        fill: float,
        index: dict[str, list[int]],
    ) -> bool:
        some = {"B": index["B"], "Q": index["Q"]}
        new: Counts = {**self.counts, **{kind: len(chosen) for kind, chosen in some.items()}}
        few = {**new, "K": len(index["K"])}
        hidden = torch.ones(self.counts["K"], dtype=torch.bool)
        hidden[index["K"]] = False
        whole = self._chosen(of, inputs_of(node), reads, some)
        chosen = self._chosen(of, inputs_of(node), reads, index)
        for place, read in enumerate(reads):
            if read is None or set(tokens(read)) != {"Q", "K"}:
                continue
            if fill < 0 and (Factor("K"),) in read:
                # The numbers of a query that sees no key are undefined.
                lost = chosen[place].le(HIDDEN).all(axis_of(read, "K"), keepdim=True)
                chosen[place], whole[place] = (
                    x.masked_fill(lost, 0) for x in (chosen[place], whole[place])
                )
            whole[place] = filled(whole[place], read, new, hidden, fill)
        got = self.values.call(node, whole, new, "K", roles)
        expected = self.values.call(node, chosen, few, "K", roles)
        got = select(got, roles, {"K": index["K"]}, new)
        known = ~expected.isnan()  # NaN: a query that sees none of these keys
        if got.shape != expected.shape or not same(got[known], expected[known]):
            return False
        return self.acts_on_each(node, reads, roles, "K", [some])

    def _several(self, node: Node) -> Step:
        """Return the step of an operator with several outputs (split, max with indices)."""
        for reads in itertools.product(*(self._ways(other) for other in inputs_of(node))):
            found = []
            for part, value in enumerate(node.meta["val"]):
                allowed = self.readings(value, _tokens_of(reads))
                kept = (r for r in allowed if self._keeps_tokens(node, reads, r))
                acts = (r for r in kept if self.acts_on_each(node, reads, r, part=part))
                roles = next(acts, None)
                if roles is None:
                    break
                found.append(roles)
            if len(found) == len(node.meta["val"]):
                return Each(found, reads)
        return refuse(node, MIXES)

    # Totals of earlier tokens, and the third property

    def _running(self, node: Node) -> Step | None:
        if node.target not in RUNNING:
            return None
        source: Any = node.args[0]
        own = self.steps[source].roles
        along: Any = node.args[1]
        axis = (along[0] if isinstance(along, list) else along) % len(own)
        if own[axis] != (Factor("Q"),) or tokens(own) != ["Q"]:
            return None
        return Running(own, source, RUNNING[node.target])

    def _roots(self, node: Node) -> set[Node]:
        """Return the values with plain token axes that a node of an open region reads."""
        step = self.steps[node]
        if isinstance(step, Open):
            return {step.root}
        if isinstance(step.roles, list) or is_plain(step.roles):
            return {node}
        return set[Node]().union(*(self._roots(other) for other in self.values.data_of(node)))

    def _window(self, node: Node) -> Step:
        """Return the step of a node that ends a region with the third property, or of one within a
        region that has not ended.
        """
        values = self.values
        data = values.data_of(node)
        opened = [step for step in map(self.steps.get, data) if isinstance(step, Open)]
        first = opened[0].first if opened else node
        roots = set[Node]().union(*(self._roots(other) for other in data))
        if len(roots) != 1:
            refuse(first, MIXES)
        root = roots.pop()
        own = self.steps[root].roles
        if tokens(own, OF_TOKENS) == ["Q", "D"]:
            return self._skew(node, root) or Open((), root, first)
        if tokens(own) != ["Q"] or (Factor("Q"),) not in own or not self.causal:
            refuse(first, MIXES)
        region = self.between(root, node)
        for roles in self.readings(node.meta["val"], "Q", "Q"):
            if (Factor("Q"),) in roles:
                reach = reach_of(self, region, root, node, roles)
                if reach is not None:
                    return Window(roles, root, tuple(region), reach)
        if not node.users or any(user.op == "output" for user in node.users):
            refuse(first, MIXES)
        return Open((), root, first)

    def between(self, root: Node, node: Node) -> list[Node]:
        """Return the nodes after `root` that a node depends on, and the node, in order. Nodes that
        depend on the length alone are among them.
        """
        needed: set[Node] = set()
        left = [node]
        while left:
            inner = left.pop()
            if inner not in needed and inner is not root:
                needed.add(inner)
                left += [a for a in inputs_of(inner) if self.values.kind[a] in ("data", "length")]
        return [inner for inner in self.values.nodes if inner in needed]

    def run_region(
        self, region: Sequence[Node], root: Node, x: Tensor, given: Any = None
    ) -> Tensor:
        """Run nodes on another value of `root`, with as many tokens as it has.

        given: returns the value of a node that depends on weights alone; None for that of the run.
        """
        given = given or self.values.of.get
        roles = self.steps[root].roles
        length, axis = x.shape[axis_of(roles, "Q")], axis_of(roles, "B")
        each = math.prod(f.kind for f in roles[axis] if isinstance(f.kind, int))
        counts: Counts = {"B": x.shape[axis] // each, "Q": length, "K": length}
        found: dict[Node, Any] = {root: x}
        for node in region:
            inputs = [
                found[a] if a in found else None if self.values.kind[a] == "size" else given(a)
                for a in inputs_of(node)
            ]
            found[node] = self.values.call(node, inputs, counts)
        result: Tensor = found[region[-1]]
        return result

    def _skew(self, node: Node, root: Node) -> Step | None:
        """Return the step of scores by distance [Q,D] that are padded, reshaped and cut to scores
        of keys: entry j of query i was at distance i - j. Entries of later keys are not compared.
        """
        own, x, y = self.steps[root].roles, self.values.of[root], self.values.of[node]
        if any(len(axis) > 1 for axis in own) or y.shape != x.shape:
            return None
        order = skewed_last(own)
        x, y, length = x.permute(order), y.permute(order), self.counts["Q"]
        i, j = torch.arange(length)[:, None], torch.arange(length)
        moved = x.gather(-1, (j - i + length - 1).clamp(max=length - 1).expand(x.shape))
        return Skew(renamed(own, "D", "K"), root) if same(y.tril(), moved.tril()) else None


def _tokens_of(reads: Reads) -> set[Any]:
    return {kind for read in reads if read for kind in tokens(read, OF_TOKENS)}
