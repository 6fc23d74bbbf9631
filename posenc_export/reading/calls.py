"""The forward pass of a module on new tokens, with positions and caches."""

import math
from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from posenc_export.ops import apply_rotation
from posenc_export.ops.layers import EDGE
from posenc_export.ops.recurrence import running_total
from posenc_export.reading.axes import (
    Counts,
    Factor,
    Roles,
    axis_of,
    factors,
    filled,
    in_axes,
    in_heads,
    is_plain,
    kinds,
    renamed,
    shape_of,
    skewed_last,
    split,
    tokens,
    with_rows,
)
from posenc_export.reading.filters import Filter, by_token, filter_of
from posenc_export.reading.lengths import Call, Fill, Lengths, triangle
from posenc_export.reading.operators import of_all_rows, rows_first, rows_in_place
from posenc_export.reading.properties import MIXES, Properties
from posenc_export.reading.recurrent_groups import operands
from posenc_export.reading.refused import refuse
from posenc_export.reading.steps import (
    Attend,
    Cached,
    Cut,
    Each,
    Given,
    Item,
    OfMemory,
    Open,
    OverKeys,
    Recurrent,
    Rotated,
    Running,
    Skew,
    Window,
)
from posenc_export.reading.values import LAYOUT, depending, inputs_of, packet

TO_SLOTS = "tokens"  # name of a cache that is neither keys nor values
WHOLE = 2**24  # largest whole number up to which float32, the dtype of states, has no gaps
TOO_LARGE = (
    f"and a state holds them, or their sum or product over all positions, up to {WHOLE:,}; compute"
    " smaller ones, such as remainders"
)


class Cache(NamedTuple):
    """A cache [B, heads, T, size], the state [B, heads, size, values] of a recurrence, or the
    window's last tokens [B, size, values].

    Attributes:
        layer: index of the attention that reads it, or of the last one before it.
        name: "key", "value", or "tokens", "state", "total" or "tail" with a number.
        heads: 0 for the last tokens.
        values: 0 for a cache.
    """

    layer: int
    name: str
    heads: int
    size: int
    values: int = 0

    def empty(self, rows: int, slots: int) -> Tensor:
        """Return zeros for no tokens, in a cache for `slots` of them."""
        by_token = (slots, self.size) if not self.values else (self.size, self.values)
        return torch.zeros(rows, *([self.heads] if self.heads else []), *by_token)


def empty_memory(parts: Sequence[tuple[int, int]], rows: int, count: int) -> list[Tensor]:
    """Return what calls take from an encoder for `count` tokens: a mask [B,M] int64, and zeros
    [B,heads,M,size] for each part (heads, size); nothing without parts.
    """
    mask = torch.ones(rows, count, dtype=torch.int64)
    return [mask, *(torch.zeros(rows, n, count, size) for n, size in parts)] if parts else []


class Tail(NamedTuple):
    """The last tokens of a value that windows read again."""

    root: Node


class Calls(torch.nn.Module):
    """A graph as calls on new tokens.

    Args:
        properties: with a step for each node that depends on the tokens.
        lengths: tables of what depends on the length alone.
    """

    def __init__(self, properties: Properties, lengths: Lengths) -> None:
        super().__init__()
        self.properties, self.values = properties, properties.values
        self.steps, self.kind = properties.steps, properties.values.kind
        self.lengths, self.operators = lengths, lengths.operators
        self.after = 0 if properties.causal else -1
        self.kept: list[Cached] = []
        self.plans: dict[Any, Any] = {}
        self.in_full: set[Node] = set()  # nodes for which inputs of one row must be repeated
        self.order = self._needed()
        self.reach: dict[Node, int] = {}  # of values that windows read
        self.filters: dict[Node, Filter | None] = {}
        held: dict[Node | Tail, None] = {}
        for node in self.order:
            step = self.steps[node]
            if isinstance(step, Window):
                self.reach[step.root] = max(step.reach, self.reach.get(step.root, 0))
                self.filters[node] = filter_of(properties, node, step)
                held.setdefault(Tail(step.root))
            elif isinstance(step, Recurrent) or (isinstance(step, Running) and properties.causal):
                held.setdefault(node)
        self.states = list(held)  # in the order of the nodes that read them
        # What a query without keys gives may be NaN, whose products with weights of 0 are NaN.
        reduces = (OverKeys, Cut)
        self.clears_padding = any(isinstance(self.steps[node], reduces) for node in self.order)
        over = [(node, self.steps[node]) for node in self.order]
        of = (n for n, s in over if isinstance(s, OverKeys) and s.undefined > -math.inf)
        self.undefined = depending(self.values.graph, of)
        self.whole = self._whole_numbers()
        self._hold_weights()
        parts = (self.steps[node] for node in self.order)
        found = {(s.begin, s.heads, s.size) for s in parts if isinstance(s, OfMemory)}
        self.memory = [(heads, size) for _, heads, size in sorted(found)]
        self.memory_at = {begin: index for index, (begin, _, _) in enumerate(sorted(found))}
        self.caches = self._described() if properties.causal else []
        self.selected = self._last_mixed() if properties.causal else None

    def _needed(self) -> list[Node]:
        """Return the nodes that a call computes. Finds caches and plans."""
        needed: dict[Node, list[Cached]] = {}  # with the caches that they read
        left = [self.values.out]
        while left:
            node = left.pop()
            if node in needed:
                continue
            step, caches = self.steps[node], needed.setdefault(node, [])
            if isinstance(step, Open):
                refuse(step.first, MIXES)
            elif isinstance(step, Attend):
                left.append(step.q)
                caches += [step.key, step.value]
            elif isinstance(step, (Rotated, Skew, Window)):
                left.append(step.root)
            elif isinstance(step, (Cut, Item, Recurrent, Running)):
                left += self.values.data_of(node)
            elif isinstance(step, (Each, OverKeys)):
                for other, read in zip(inputs_of(node), step.reads, strict=True):
                    if self.kind[other] == "length":
                        self.plans[node, other, read] = self.lengths.pairs(other, read or ())
                    elif self.kind[other] == "data" and self._is_key(other, read):
                        caches.append(Cached(self._root(other)))
                    elif self.kind[other] == "data":
                        left.append(other)
            left += [cached.node for cached in caches]
        order = [node for node in self.values.nodes if node in needed]
        self.kept = list(dict.fromkeys(cached for node in order for cached in needed[node]))
        return order

    def _is_key(self, node: Node, read: Roles | None) -> bool:
        """Return whether a value at queries is read at keys."""
        own = self.steps[node].roles
        return read is not None and "K" in tokens(read) and "K" not in tokens(own)

    def _root(self, node: Node) -> Node:
        """Return the value to cache for a node: the smallest one that gives it by rearranging and
        repeating. Of several, one with an axis of heads, or else the earliest.
        """
        chain = [node]
        while packet(chain[-1]) in LAYOUT and isinstance(self.steps[chain[-1]], Each):
            above = self.values.data_of(chain[-1])
            read = {self.kind[other] for other in inputs_of(chain[-1])}
            if len(above) != 1 or "length" in read:
                break
            roles = self.steps[above[0]].roles
            if not isinstance(roles, tuple) or tokens(roles) != ["Q"]:
                break
            chain.append(above[0])
        least = min(self.values.of[other].numel() for other in chain)
        small = [other for other in chain if self.values.of[other].numel() == least]
        in_two = [
            other
            for other in small
            if sum(isinstance(k, int) and k > 1 for k in kinds(self.steps[other].roles)) == 2
        ]
        return in_two[0] if in_two else small[-1]

    def _whole_numbers(self) -> int:
        """Return the largest whole number that caches keep for a token; counts may grow up to the
        number of positions. Refused: a number or a total is larger than float32 holds.
        """

        def largest(node: Node) -> int:
            x = self.values.of[node]
            return 0 if x.is_floating_point() else int(x.to(torch.int64).abs().max())

        most, steps = self.values.max_positions, {n: self.steps[n] for n in self.order}
        counts = any(isinstance(s, OverKeys) and largest(n) > 1 for n, s in steps.items())
        roots = [cached.node for cached in self.kept]
        roots += [held.root for held in self.states if isinstance(held, Tail)]
        kept = [(root, largest(root) + most * (counts and largest(root) > 1)) for root in roots]
        times = {"sum": most, "product": WHOLE}
        running = [step for step in steps.values() if isinstance(step, Running)]
        totals = [(s.source, largest(s.source) * times.get(s.kind, 1)) for s in running]
        for node, number in kept + totals:
            if number > WHOLE:
                refuse(node, f"gives whole numbers up to {largest(node):,}, {TOO_LARGE}")
        return max((n for _, n in kept), default=0) if self.properties.causal else 0

    def _hold_weights(self) -> None:
        """Register the constants of the graph, and what is computed from them alone."""
        self.weight_names: dict[Node, str] = {}
        read = {other for node in self.order for other in inputs_of(node)}
        read |= set().union(*(self._read_by(plan) for plan in self.plans.values()), set())
        decays = {n.args[3] for n in self.order if isinstance(self.steps[n], Recurrent)}
        for node in self.values.nodes:
            if self.kind[node] != "const" or self._rearranges(node):
                continue
            value = self.values.of[node]
            if not isinstance(value, Tensor):
                continue
            if node not in self.values.constants and node not in read:
                continue
            name = f"weight{len(self.weight_names)}"
            value = value.float() if node in decays else value  # in float64 while it was compared
            self.register_buffer(name, value.detach())
            self.weight_names[node] = name
        self.operators.given = self.given

    def _read_by(self, plan: Any) -> set[Node]:
        """Return the nodes that a plan reads, with those of the plans within it."""
        found = set(inputs_of(plan.node)) if hasattr(plan, "node") else set()
        inner = [getattr(plan, "inside", None), *getattr(plan, "inputs", ())]
        return found.union(*(self._read_by(other) for other in inner if other is not None))

    def _rearranges(self, node: Node) -> bool:
        """Return whether a node only rearranges a weight, which is done again in each call."""
        return packet(node) in LAYOUT and [self.kind[other] for other in inputs_of(node)] == [
            "const"
        ]

    def given(self, node: Node) -> Any:
        """Return the value of a node that depends on weights alone; None for a size."""
        if node in self.weight_names:
            return self.get_buffer(self.weight_names[node])
        if self._rearranges(node):
            inputs = [self.given(other) for other in inputs_of(node)]
            return self.values.call(node, inputs, self.values.counts)
        return self.values.of.get(node)

    def _described(self) -> list[Cache]:
        """Return the caches, by the attention that reads them."""
        attends = [step for step in map(self.steps.get, self.order) if isinstance(step, Attend)]
        names: dict[Cached, tuple[int, str]] = {}
        for layer, step in enumerate(attends):
            names.setdefault(step.key, (layer, "key"))
            names.setdefault(step.value, (layer, "value"))
        found, layer = [], 0
        for index, cached in enumerate(self.kept):
            layer, name = names.get(cached, (layer, f"{TO_SLOTS}{index}"))
            heads, size = self._new(cached, self.values.of, self.values.counts).shape[2:]
            found.append(Cache(layer, name, int(heads), int(size)))
        for number, held in enumerate(self.states):
            of: Any = self.steps[held.root if isinstance(held, Tail) else held]
            if isinstance(of, Recurrent):
                found.append(Cache(layer, f"state{number}", *of.state))
                continue
            width = math.prod(n for n in kinds(of.roles) if isinstance(n, int))
            if isinstance(held, Tail):
                found.append(Cache(layer, f"tail{number}", 0, self.reach[held.root], width))
            else:
                found.append(Cache(layer, f"total{number}", 1, 2, width))
        return found

    def _last_mixed(self) -> Node | None:
        """Return the value [B,Q,E] of which tokens without requested logits can be dropped: between
        it and the output, all operators act on each token alone. Of these values the smallest, and
        of equal ones the last, so that the operators of a norm stay together.
        """
        node, best = self.values.out, None
        while isinstance(self.steps[node], Each) and node.target is not EDGE:
            above = self.values.data_of(node)
            others = {self.kind[other] for other in inputs_of(node)} - {"data", "const"}
            step: Any = self.steps[node]
            if (
                len(set(above)) != 1
                or others
                or self._is_key(above[0], _read(node, above[0], step))
            ):
                break
            node = above[0]
            value, roles = self.values.of[node], self.steps[node].roles
            is_flat = not isinstance(roles, list) and kinds(roles)[:2] == ["B", "Q"]
            if is_flat and is_plain(roles) and len(kinds(roles)) == 3 == len(roles):
                if best is None or value.numel() < self.values.of[best].numel():
                    best = node
        return best

    # A call

    def forward(self, call: Call, index: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return the output of the tokens of a call, or of those at index [B,R], and new states."""
        for node in self.order:
            call.values[node] = self._compute(node, call)
            if node is self.selected and index is not None:
                call.values[node] = call.ops.select_tokens(call.values[node], index)
                call.counts = {**call.counts, "Q": index.shape[1]}
        present = [] if self.after else [self._cached(cached, call) for cached in self.kept]
        present += [call.cached[held] for held in self.states]
        return call.values[self.values.out], present

    def _new(self, cached: Cached, values: dict[Node, Any], counts: Any) -> Tensor:
        """Return the new tokens of a cached value as [B,S,N,D], without padding beside them."""
        node, roles = cached.node, self.steps[cached.node].roles
        order = list(cached.order or by_token(roles))
        new = split(values[node], roles, counts).permute(order)
        if not is_plain(roles):
            new = new.narrow(1, factors(roles)[order[1]].left, counts["Q"])
        if new.dim() == 2:
            new = new[:, :, None, None]
        elif new.dim() == 3 or (cached.order is None and new.dim() > 4):
            new = new.flatten(2).unsqueeze(2)
        elif new.dim() > 4:
            new = new.flatten(2, -2)
        return new[:, :, :: cached.copies] if cached.copies > 1 else new

    def _cached(self, cached: Cached, call: Call) -> Tensor:
        """Append the new tokens of a value to its cache: [B,N,T,D]."""
        if cached not in call.cached:
            new = self._new(cached, call.values, call.counts)
            new = new.to(torch.float32)
            if self.clears_padding:
                new = torch.where(call.positions.ge(0)[:, :, None, None], new, torch.zeros(()))
            if self.after:  # bidirectional: a call has all tokens, and nothing is cached
                call.cached[cached] = new.transpose(1, 2)
            else:
                past = call.states[self.kept.index(cached)]
                call.cached[cached] = call.ops.append(past, new, call.write_index)
        return call.cached[cached]

    def _key(self, node: Node, call: Call) -> Tensor:
        """Return a value with one axis of tokens for all cached tokens."""
        if node not in call.keys:
            call.keys[node] = self._key_value(node, call)
        return call.keys[node]

    def _key_value(self, node: Node, call: Call) -> Tensor:
        own, counts = self.steps[node].roles, call.counts
        if node is not self._root(node):
            inputs = [
                self._key(other, call) if self.kind[other] == "data" else self.given(other)
                for other in inputs_of(node)
            ]
            result: Tensor = self.values.call(node, inputs, counts, "K", renamed(own, "Q", "K"))
            return result
        y = self._cached(Cached(node), call).transpose(1, 2)  # [B,T,N,D]
        y = self._laid_out(y, node, renamed(own, "Q", "K"), counts)
        if not is_plain(own):  # padding beside the tokens is the same in all calls, or not seen
            axis, new = axis_of(own, "Q"), call.values[node]
            ((tokens_of,),) = (part for part in own if part[0].kind == "Q")
            after = tokens_of.left + counts["Q"]
            left = new.narrow(axis, 0, tokens_of.left)
            y = torch.cat((left, y, new.narrow(axis, after, tokens_of.right)), axis)
        return y

    def _laid_out(self, y: Tensor, node: Node, roles: Roles, counts: Counts) -> Tensor:
        """Return y [B,T,N,D] or [B,T,N*D], or of S tokens, with the axes of a cached value."""
        order, flat = by_token(self.steps[node].roles), factors(roles)
        sizes = [int(flat[i].kind) for i in order[2:]]
        if y.dim() != len(order):
            y = y.squeeze(2) if y.dim() == 4 else y
            y = y.unflatten(2, sizes) if len(sizes) > 1 else y if sizes else y.squeeze(2)
        y = y.permute([order.index(i) for i in range(len(order))])
        if len(order) != len(roles):
            y = y.reshape(shape_of(roles, counts))
        dtype = self.values.of[node].dtype
        return y if y.dtype == dtype else y.to(dtype)

    def _compute(self, node: Node, call: Call) -> Any:
        step, values = self.steps[node], call.values
        if isinstance(step, Given):
            return call.x if node is self.values.input else call.memory[0]
        if isinstance(step, OfMemory):
            part = call.memory[1 + self.memory_at[step.begin]].transpose(1, 2)
            return in_axes(part, step.roles, step.order, call.counts)
        if isinstance(step, Item):
            return values[inputs_of(node)[0]][node.args[1]]  # type: ignore[index]
        if isinstance(step, Attend):
            return self._attend(step, call)
        if isinstance(step, Rotated):
            return self._rotated(step, call)
        if isinstance(step, Cut):
            return triangle(values[inputs_of(node)[0]], step, call)
        if isinstance(step, Window):
            return self._window(node, step, call)
        if isinstance(step, Running):
            return self._running(node, step, call)
        if isinstance(step, Recurrent):
            return self._recurrent(node, step, call)
        if isinstance(step, Skew):
            order = skewed_last(self.steps[step.root].roles)
            x = values[step.root].permute(order)
            index = (call.away + call.last).clamp(0, call.last)
            index = index[(slice(None), *[None] * (x.dim() - 3))]  # [B,1,..,S,T]
            y = x.gather(-1, index.expand(-1, *x.shape[1:-2], -1, -1))
            return y.permute([order.index(axis) for axis in range(len(order))])
        assert isinstance(step, (Each, OverKeys))
        return self._operate(node, step, call)

    def _operate(self, node: Node, step: Any, call: Call) -> Any:
        """Run an operator. Keys that are undefined, and have no weight, count as 0."""
        inputs, apart = self._inputs(node, step, call)
        lost = list(inputs)
        if isinstance(step, OverKeys) and step.fill == 0:
            for place, (other, read) in enumerate(zip(inputs_of(node), step.reads, strict=True)):
                if other in self.undefined and read and tokens(read) == ["K"]:
                    x = inputs[place]
                    inputs[place] = torch.where(x.isnan(), torch.zeros((), dtype=x.dtype), x)
                    lost[place] = x.isnan().to(x.dtype)
        y = self._run(node, step, inputs, apart, call)
        if all(a is b for a, b in zip(inputs, lost, strict=True)):
            return y
        pairs = [bool(read) and set(tokens(read)) == {"Q", "K"} for read in step.reads]
        lost = [x.ne(0).to(x.dtype) if p else x for x, p in zip(lost, pairs, strict=True)]
        reads_lost = self._run(node, step, lost, apart, call).gt(0)
        return torch.where(reads_lost, torch.full((), math.nan, dtype=y.dtype), y)

    def _inputs(self, node: Node, step: Any, call: Call) -> tuple[list[Any], list[Any]]:
        """Return what an operator reads, and of each input "first" if it has rows first, its roles
        if it has rows among them, or None.
        """
        counts, inputs, apart = call.counts, list[Any](), list[Any]()
        for other, read in zip(inputs_of(node), step.reads, strict=True):
            hides = isinstance(step, OverKeys) and read and set(tokens(read)) == {"Q", "K"}
            kind, x = self.kind[other], None
            of_rows: Any = None
            if kind == "length":
                plan = self.plans[node, other, read]
                if isinstance(plan, Fill) and not hides:
                    inputs.append(plan.of(counts))
                    apart.append(read if "B" in kinds(read) else None)
                    continue
                x, has_rows = self.lengths.value(plan, call)
                if hides and not has_rows:
                    x, has_rows = x.expand(counts["B"], *x.shape), True
                if hides:
                    x = filled(x, with_rows(read), counts, ~call.seen, step.fill)
                of_rows = "first" if has_rows else None
                if has_rows and (Factor("B"),) in read:
                    x, of_rows = rows_in_place(x, read, counts), read
            elif kind == "data":
                x = self._key(other, call) if self._is_key(other, read) else call.values[other]
                if hides:
                    x = filled(x, read, counts, ~call.seen, step.fill, step.undefined)
                of_rows = read
            else:
                x = self.given(other)
            inputs.append(x)
            apart.append(of_rows)
        return inputs, apart

    def _run(self, node: Node, step: Any, inputs: list[Any], apart: list[Any], call: Call) -> Any:
        """Run an operator on what it reads, by rows if that has values of positions."""
        counts = call.counts
        if "first" not in apart:
            if node not in self.in_full:
                try:
                    return self.values.call(node, inputs, counts, step.sizes, step.roles)
                except RuntimeError:  # raised by torch if values of one row must be repeated
                    self.in_full.add(node)
            inputs = list(inputs)
            for place, (other, read) in enumerate(zip(inputs_of(node), step.reads, strict=True)):
                of_one = self.kind[other] == "length" and apart[place] is None
                if of_one and read and "B" in kinds(read):
                    inputs[place] = of_all_rows(inputs[place], read, counts)
            return self.values.call(node, inputs, counts, step.sizes, step.roles)
        moved = [
            x if roles is None or roles == "first" else rows_first(x, roles, counts)
            for x, roles in zip(inputs, apart, strict=True)
        ]
        have = [roles is not None for roles in apart]
        one = {**counts, "B": 1}
        y = self.operators.by_row(node, moved, have, one, step.sizes, step.roles)
        return rows_in_place(y, step.roles, counts)

    def _attend(self, step: Attend, call: Call) -> Tensor:
        ops, counts = call.ops, call.counts
        q = in_heads(call.values[step.q], self.steps[step.q].roles, step.q_order, counts)
        k, v = self._cached(step.key, call), self._cached(step.value, call)
        dtype, q = q.dtype, q.to(k.dtype)
        bias = None
        if step.bias is not None:
            bias = self.lengths.scores(step.bias, step.bias_roles, call).to(q.dtype)
            if bias.shape[1] not in (1, step.heads):
                bias = bias.expand(-1, step.heads, -1, -1)
            bias = bias.clamp(min=-1e30)
        limits = (step.before, step.after, step.chunk)
        mask = ops.attention_mask(call.positions, call.key_positions, bias, q, *limits)
        sinks = step.sinks
        sinks = self.given(sinks).flatten() if isinstance(sinks, Node) else sinks
        y = ops.attend(q, k, v, mask, None, step.scale, step.softcap, sinks).to(dtype)  # [B,S,H*D]
        return in_axes(y, step.roles, step.y_order, counts)

    def _rotated(self, step: Rotated, call: Call) -> Tensor:
        """Turn heads by the positions or coordinates of a call."""
        roles = self.steps[step.root].roles
        x = in_heads(call.values[step.root], roles, step.root_order, call.counts)
        names, x, pairs = (step.cos, step.sin), step.form.before(x), step.form.after.interleaved
        if step.of_axis:
            cos, sin = (self.lengths.of_coordinates(name, step.of_axis, call) for name in names)
            y = apply_rotation(x, cos, sin, pairs)
        else:
            tables = (self.lengths.get_buffer(name) for name in names)
            y = call.ops.rotate_pairs(x, call.positions, *tables, pairs, step.linear)
        return in_axes(y, step.roles, step.order, call.counts)

    def _running(self, node: Node, step: Running, call: Call) -> Tensor:
        """Continue a total. A token of padding leaves it as it is."""
        x, kept = self._by_token(step.source, call), node in self.states
        past = self._past(node, call) if kept else x.new_zeros(x.shape[0], 1, 2, x.shape[2])
        valid, most = call.positions.ge(0), self.values.capture.max_positions
        y, last = running_total(x, valid, past, step.kind, most)
        if kept:
            call.cached[node] = last
        return self._laid_out(y, node, step.roles, call.counts)

    def _recurrent(self, node: Node, step: Recurrent, call: Call) -> Tensor:
        """Continue a recurrence. A token of padding writes nothing, and nothing is forgotten."""
        read: Any = {n: call.values.get(n, self.given(n)) for n in inputs_of(node)}
        given = operands(*(read.get(of, of) for of in node.args))
        valid, zero = call.positions.ge(0)[:, :, None], torch.zeros(())
        cleared = {3, 1 if given[4] is None else 4} | ({1, 2} if self.clears_padding else set())
        q, k, v, decay, rate = (
            x
            if x is None or place not in cleared
            else torch.where(valid if x.dim() == 3 else valid[..., None], x, zero)
            for place, x in enumerate(given)
        )
        y, call.cached[node] = call.ops.gated_delta(q, k, v, decay, rate, self._past(node, call))
        return y

    def _past(self, held: Node | Tail, call: Call) -> Tensor:
        """Return the state of a recurrence or a window before a call."""
        return call.states[len(self.kept) + self.states.index(held)]

    def _window(self, node: Node, step: Window, call: Call) -> Tensor:
        """Run a region on the tokens of a call and the last ones before them."""
        x, reach, filtered = self._with_tail(step.root, call), step.reach, self.filters[node]
        if filtered is not None:
            weight = self.given(filtered.weight).reshape(x.shape[2], -1)
            first = self.reach[step.root] - reach
            y = x[:, first:-reach] * weight[:, 0]
            for tap in range(1, reach + 1):
                y = y + x[:, first + tap : tap - reach or None] * weight[:, tap]
            y = y if filtered.bias is None else y + self.given(filtered.bias)
            return self._laid_out(y, step.root, step.roles, call.counts)
        counts = {**call.counts, "Q": call.counts["Q"] + self.reach[step.root]}
        x = self._laid_out(x, step.root, self.steps[step.root].roles, counts)
        y = self.properties.run_region(step.region, step.root, x, self.given)
        return y[(*[slice(None)] * axis_of(step.roles, "Q"), slice(self.reach[step.root], None))]

    def _by_token(self, node: Node, call: Call) -> Tensor:
        """Return a value as floating-point numbers of each token [B,S,C]."""
        roles = self.steps[node].roles
        x = split(call.values[node], roles, call.counts).permute(by_token(roles))
        x = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
        return x.to(torch.float32)

    def _with_tail(self, root: Node, call: Call) -> Tensor:
        """Return the last r earlier tokens and the tokens of a call [B,r+S,C]. Padding in front of
        the tokens comes first. Keeps the last tokens for the next call.
        """
        held, reach = Tail(root), self.reach[root]
        if held not in call.tails:
            new = self._by_token(root, call)
            (behind, last), past = call.around_padding(reach), self._past(held, call)
            call.tails[held] = call.ops.select_tokens(torch.cat((past, new), 1), behind)
            call.cached[held] = call.ops.select_tokens(call.tails[held], last)
        return call.tails[held]


def _read(node: Node, other: Node, step: Each) -> Any:
    return next(read for a, read in zip(inputs_of(node), step.reads, strict=True) if a is other)
