"""The gated linear recurrence as one operation, in place of operators of a trace that compute it.

S = e^g S + r k (v - S^T k)^T, or S = e^g S + k v^T without rates; y = S^T q.
"""

import functools
import itertools
import math
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor, library, nn
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from posenc_export.ops.recurrence import gated_delta
from posenc_export.reading.exact import widened
from posenc_export.reading.joined import Trace
from posenc_export.reading.values import LAYOUT, aten, depending, packet

LIBRARY = "posenc_recurrence"
library.define(
    f"{LIBRARY}::run",
    "(Tensor? q, Tensor k, Tensor? v, Tensor? decay, Tensor? rate, float kept) -> Tensor",
)
RUN = torch.ops.posenc_recurrence.run.default
NEAR = 1e-9  # of the largest number, in float64
MOST_ENTRIES = 6  # inputs of a group, whose roles are found by trying all
LEAST = 1e-37  # added to a factor of which the logarithm is taken
# Operators without branches and bounds: a group of them that is a recurrence for random numbers is
# one for all numbers.
SMOOTH = set(
    """add sub rsub mul neg div exp matmul mm bmm baddbmm addmm linear einsum sum cumsum tril triu
    masked_fill where constant_pad_nd pad cat stack select slice narrow split split_with_sizes chunk
    unbind select_scatter slice_scatter copy to _to_copy float movedim swapaxes getitem
    linalg_solve_triangular""".split()
) | {operator.__name__ for operator in LAYOUT}
ROLES = ("q", "k", "v", "decay", "rate")


def operands(
    q: Any, k: Any, v: Any, decay: Any, rate: Any, kept: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the arguments of ops.gated_delta. Queries and values of None are 1. decay: logarithms
    [B,S,H]; or [H], those of all tokens; or None for the factor `kept`.
    """
    heads = k.shape[2] if v is None else v.shape[2]
    ones = torch.ones((), dtype=k.dtype)
    q = ones.expand(k.shape) if q is None else q
    v = ones.expand(*k.shape[:2], heads, 1) if v is None else v
    if decay is None:
        decay = torch.full_like(v[..., 0], math.log(kept))
    elif decay.dim() == 1:
        decay = decay.to(v.dtype).expand_as(v[..., 0])
    return q, k, v, decay, rate


def run(*given: Any) -> Tensor:
    """Run a recurrence over whole sequences; arguments as for `operands`."""
    q, k, v, decay, rate = operands(*given)
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    return gated_delta(q, k, v, decay, rate, state)[0].contiguous()


library.impl(f"{LIBRARY}::run", "CompositeExplicitAutograd", run)


@library.register_fake(f"{LIBRARY}::run")
def _(*given: Any) -> Tensor:
    v = operands(*given)[2]
    return torch.empty(v.shape, dtype=v.dtype)


def axes_of(t: Tensor, rows: int, length: int) -> tuple[int, int] | None:
    """Return the axes of rows and tokens; None if one is missing, repeated or part of another."""
    shape = list(t.shape)
    if (shape.count(rows), shape.count(length)) != (1, 1):
        return None
    if any(size % length == 0 and size > length for size in shape):
        return None
    return shape.index(rows), shape.index(length)


def near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not bool(b.isfinite().all()):
        return False
    largest = max(float(b.abs().max()), 1e-12) if b.numel() else 1.0
    return bool((a - b).abs().le(NEAR * largest).all())


class Cut:
    """Replace groups of operators that compute a recurrence by one operation each. A group is
    connected by values without an axis of tokens.

    Args:
        trace: at one number of rows and tokens; its graph is changed.
        inputs: of the module.
        forms: those of the groups in another trace of the module; empty for the first trace.

    Attributes:
        found: the forms of the groups that were replaced.
    """

    def __init__(self, trace: Trace, inputs: Sequence[Tensor], forms: Sequence["Form"]) -> None:
        self.graph = trace.graph
        self.rows, self.length = inputs[0].shape[:2]
        root = nn.Module()
        vars(root).update(trace.held)
        run_all = Interpreter(root, garbage_collect_values=False, graph=self.graph)
        run_all.run(*inputs)
        self.values: dict[Node, Any] = run_all.env
        placeholders = (n for n in self.graph.nodes if n.op == "placeholder")
        self.data = depending(self.graph, (n for n in placeholders if self._has_tokens(n)))
        self.output = next(iter(reversed(self.graph.nodes)))
        self.forms, self.found = forms, list[Form]()
        for group in self._groups():
            self._replace(group)
        self.graph.eliminate_dead_code()

    def _has_tokens(self, node: Node) -> bool:
        """Return whether a value has an axis of tokens, or one of rows and tokens."""
        sizes = {n for y in pytree.tree_leaves(self.values[node]) for n in y.shape if n}
        return any(n == self.length or n % (self.rows * self.length) == 0 for n in sizes)

    def _groups(self) -> list[list[Node]]:
        inside = {n for n in self.data if not self._has_tokens(n)}
        ends = {n for n in self.data - inside if inside & set(n.all_input_nodes)}
        group: dict[Node, int] = {}
        for place, node in enumerate(n for n in self.graph.nodes if n in inside | ends):
            read = [n for n in node.all_input_nodes if n in inside]
            self._join(group, {group[n] for n in read}, [node], place)
        for own in dict.fromkeys(group.values()):
            # Sizes in a loop may equal the number of tokens: nodes between others belong to it.
            for node in self._between([n for n in group if group[n] == own]):
                self._join(group, {own, group.get(node, own)}, [node], own)
        order = [n for n in self.graph.nodes if n in group]
        return [[n for n in order if group[n] == g] for g in dict.fromkeys(group.values())]

    def _join(self, group: dict[Node, int], same: set[int], new: list[Node], to: int) -> None:
        if same - {to}:
            group.update({n: to for n, g in group.items() if g in same})
        group.update(dict.fromkeys(new, to))

    def _between(self, group: list[Node]) -> list[Node]:
        """Return the other nodes on paths from one node of a group to another."""
        after, before = set(group), set(group)
        for node in self.graph.nodes:
            if node in self.data and after & set(node.all_input_nodes):
                after.add(node)
        for node in reversed(self.graph.nodes):
            if before & set(node.users):
                before.add(node)
        return list(after & before - set(group))

    def _is_smooth(self, node: Node) -> bool:
        masks: dict[Any, Any] = {aten.where: node.args[:1], aten.masked_fill: node.args[1:2]}
        chosen_by = masks.get(packet(node), ())
        return packet(node).__name__ in SMOOTH and self.data.isdisjoint(chosen_by)

    def _replace(self, group: list[Node]) -> None:
        within = set(group)
        read = [n for n in group if (set(n.users) & self.data) - within or self.output in n.users]
        ends, others = ([n for n in read if self._has_tokens(n) == has] for has in (True, False))
        needed = [n for node in group for n in node.all_input_nodes if n not in within]
        entries = list(dict.fromkeys(n for n in needed if n in self.data))
        if len(ends) != 1 or others or not 1 <= len(entries) <= MOST_ENTRIES:
            return
        if not all(self._is_smooth(node) for node in group):
            return
        end = ends[0]

        def computed(given: Sequence[Tensor]) -> Tensor:
            values = {**self.values, **dict(zip(entries, given, strict=True))}
            for node in group:
                values[node] = _wide(node, values)
            result: Tensor = values[end]
            return result

        fixed = {n: widened(self.values[n]) for n in dict.fromkeys(needed) if n not in self.data}
        given = [_differing(widened(self.values[n])) for n in entries]
        roles = _Roles(computed, computed(given), given, self.rows, self.length, fixed)
        form = roles.find(self.forms[len(self.found) :][:1])
        if form is None:
            return
        self.found.append(form)
        with self.graph.inserting_after(end):
            marker = self.graph.call_function(aten.alias.default, (end,))
        end.replace_all_uses_with(marker, lambda user: user is not marker)
        with self.graph.inserting_before(marker):
            new = roles.emit(end, form, entries)
        marker.replace_all_uses_with(new)
        self.graph.erase_node(marker)


def _differing(t: Tensor) -> Tensor:
    """Return numbers that differ: equal ones, such as zeros, would not show what they do."""
    if not bool((t == t.flatten()[0]).all()):
        return t
    return t + 0.1 * torch.rand(t.shape, generator=torch.Generator().manual_seed(6)).to(t.dtype)


def _wide(node: Node, values: dict[Node, Any]) -> Any:
    """Run an operator in float64, also one that casts to another dtype."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = pytree.tree_map(widened, (args, kwargs))
    return node.target(*args, **kwargs)  # type: ignore[operator]


class Form(NamedTuple):
    """How a group is a recurrence.

    Attributes:
        roles: index of the entry that is q, k, v, decay or rate, by role.
        decay: how decays are given: "log", their logarithms, "minus", these negated, "factor", or
            "constant", the same factors at all tokens.
        scan: whether each channel is a head with a state of its own, as k [B,S,C,N] shows.
        added: index of an entry that is added to the output; None for none.
        constant: factor of this entry: the index of a fixed value, or a number.
        factor: factor of the output.
        kept: constant factors of states: the index of a fixed value, or a number.
        weight: constant factors of keys by head: the index of a fixed value.
    """

    roles: dict[str, int]
    decay: str
    scan: bool
    added: int | None = None
    constant: float | None = None
    factor: float = 1.0
    kept: float | None = None
    weight: int | None = None


class _Roles:
    """Finds the roles of values in a recurrence by shapes and numbers.

    Args:
        computed: the function of the group, from values of its entries.
        y: its result for `given`.
        given: values of the entries, each with one axis of rows and one of tokens.
        rows, length: sizes of these axes.
        fixed: values that do not depend on tokens.
    """

    def __init__(
        self,
        computed: Callable[[Sequence[Tensor]], Tensor],
        y: Tensor,
        given: list[Tensor],
        rows: int,
        length: int,
        fixed: dict[Node, Any],
    ) -> None:
        self.computed, self.given, self.fixed = computed, given, fixed
        self.y, *self.of = y, *given
        self.axes: list[Any] = [axes_of(t, rows, length) for t in (y, *given)]

    def find(self, hints: Sequence[Form]) -> Form | None:
        """Return a form that gives the numbers of the group, of `hints` or, without any, of all."""
        if None in self.axes:
            return None
        self.y, *self.of = (
            t.movedim(a, (0, 1)) for t, a in zip((self.y, *self.of), self.axes, strict=True)
        )
        tried = (self._tried(form) for form in hints or self._forms())
        return next((form for form in tried if form is not None), None)

    def _forms(self) -> Iterator[Form]:
        count = len(self.of)
        for places in itertools.product((None, *range(count)), repeat=len(ROLES)):
            roles = {n: p for n, p in zip(ROLES, places, strict=True) if p is not None}
            left = [place for place in range(count) if place not in roles.values()]
            if len(set(roles.values())) < len(roles) or "k" not in roles or len(left) > 1:
                continue
            shapes = {name: self.of[place].shape for name, place in roles.items()}
            if any(self.of[place].shape != self.y.shape for place in left):
                continue
            scan = "v" not in roles
            if not scan and (
                shapes["v"].numel() != self.y.numel() or shapes.get("q") != shapes["k"]
            ):
                continue
            if scan and ("rate" in roles or shapes.get("decay", shapes["k"]) != shapes["k"]):
                continue
            for decay in ("log", "minus", "factor") if "decay" in roles else ("", "constant"):
                yield Form(roles, decay, scan, *left)

    def _tried(self, form: Form) -> Form | None:
        """Return a form with its constants if it gives the numbers of the group, otherwise None."""
        y = self.y
        try:
            if form.decay == "constant" and form.kept is None:
                form = self._with_constants(form)
            got = run(*self._operands(form, self.of, list(self.fixed.values()), _call))
        except (RuntimeError, IndexError, ValueError):  # of other shapes
            return None
        if got.numel() != y.numel():
            return None
        got = got.reshape(y.shape)
        if form.added is not None:
            scale, constant = self._scale(form.added)
            y, form = y - self.of[form.added] * scale, form._replace(constant=constant)
            if constant is None:
                return None
        factor = float((got * y).sum() / (got * got).sum().clamp(min=1e-30))
        if not near(got * factor, y) or not float(y.abs().max()) > LEAST:
            return None
        same = abs(factor - form.factor) < NEAR * abs(factor)
        return form if same else form._replace(factor=factor)

    @functools.cache  # noqa: B019 - lives as long as a trace is cut
    def _scale(self, place: int) -> tuple[Tensor, float | None]:
        """Return the factor of an entry that is added to the output, from a run where other entries
        are 0: as numbers, and as the index of an equal constant, or one number; None for neither.
        """
        zeros = [torch.zeros_like(t) for t in self.given]
        zeros[place] = torch.ones_like(zeros[place])
        scale = self.computed(zeros).movedim(self.axes[0], (0, 1))
        return scale, self._constant(lambda t: _fits(t, scale), scale)

    def _with_constants(self, form: Form) -> Form:
        """Return a form with the factors of states and keys, from a run with the first key alone.
        Raise ValueError if they are neither fixed values nor one number.
        """
        given = [t.clone() for t in self.given]
        of = [t.movedim(axes, (0, 1)) for t, axes in zip(given, self.axes[1:], strict=True)]
        of[form.roles["k"]][:, 1:] = 0
        if form.added is not None:
            of[form.added].zero_()
        plain = run(*self._operands(form, of, (), _call))
        ratio = self.computed(given).movedim(self.axes[0], (0, 1)).reshape(plain.shape) / plain
        first, second = ratio[0, :2, :, 0]

        def constant(x: Tensor) -> float | None:
            return self._constant(lambda t: near(self._by_head(t, form, _call), x), x)

        kept, weight = constant(second / first), constant(first)
        if kept is None or weight is None:
            raise ValueError("no constant factors")
        return form._replace(kept=kept, weight=weight if isinstance(weight, int) else None)

    def _constant(self, equals: Callable[[Tensor], bool], numbers: Tensor) -> float | None:
        """Return the index of the first fixed value that equals numbers, or the one number that
        they all are; None for neither.
        """
        fixed = enumerate(self.fixed.values())
        places = [place for place, t in fixed if isinstance(t, Tensor) and equals(t)]
        first = numbers.flatten()[0]
        one = float(first) if near(first.expand(numbers.shape), numbers) else None
        return places[0] if places else one

    def _by_head(self, fixed: Any, form: Form, op: Any) -> Any:
        """Return the numbers of a fixed value, which may have the last axes of all heads alone."""
        own, shape = self.fixed.get(fixed, fixed).shape, self.y.shape[2:]
        if form.scan and own == shape[len(shape) - len(own) :]:
            fixed = op(aten.expand.default, fixed, list(shape))
        return op(aten.flatten.using_ints, fixed)

    def _operands(self, form: Form, of: Sequence[Any], fixed: Sequence[Any], op: Any) -> list[Any]:
        """Return the arguments of `run`, from entries and fixed values. op: calls operators."""
        given = {name: of[place] for name, place in form.roles.items()}
        k, axes = given["k"], {name: self.of[p].dim() for name, p in form.roles.items()}
        heads = self.of[form.roles["k"]].shape[2:]
        if form.decay == "minus":
            given["decay"] = op(aten.neg.default, given["decay"])
        elif form.decay == "factor":
            least = op(aten.add.Tensor, given["decay"], LEAST)  # that of a negative one is NaN
            given["decay"] = op(aten.log.default, least)
        if form.scan and "q" in given:  # [B,S,C,N], with q [B,S,N]
            channels = self.y.shape[2:].numel()
            sizes = channels, self.of[form.roles["q"]].shape[-1]
            if (heads[:-1].numel(), heads[-1]) != sizes or axes["q"] != 3:
                raise ValueError("no scan")
            given["k"] = op(aten.flatten.using_ints, k, 2, -2)
            q = op(aten.unsqueeze.default, given["q"], 2)
            given["q"] = op(aten.expand.default, q, [-1, -1, channels, -1])
        elif form.scan:  # [B,S,C]
            given["k"] = op(aten.unsqueeze.default, op(aten.flatten.using_ints, k, 2, -1), -1)
        for name in given.keys() & {"q", "k", "v"} if not form.scan else ():
            if axes[name] == 3:
                given[name] = op(aten.unsqueeze.default, given[name], 2)
        for name in given.keys() & {"decay", "rate"}:
            if axes[name] == 2:
                given[name] = op(aten.unsqueeze.default, given[name], 2)
            elif axes[name] > 3:
                given[name] = op(aten.flatten.using_ints, given[name], 2, -1)
        if isinstance(form.kept, int):
            kept = self._by_head(fixed[form.kept], form, op)
            given["decay"] = op(aten.log.default, op(aten.to.dtype, kept, torch.float64))
        if form.weight is not None:
            weight = self._by_head(fixed[form.weight], form, op)
            given["k"] = op(aten.mul.Tensor, given["k"], op(aten.unsqueeze.default, weight, 1))
        return [*map(given.get, ROLES), form.kept if isinstance(form.kept, float) else 1.0]

    def emit(self, end: Node, form: Form, entries: list[Node]) -> Node:
        """Return a node that computes what `end` does from the entries of its group."""
        graph = end.graph
        of: list[Any] = [
            graph.call_function(aten.permute.default, (entry, _order(t.dim(), axes)))
            for entry, t, axes in zip(entries, self.given, self.axes[1:], strict=True)
        ]
        fixed: Any = list(self.fixed)
        operands = self._operands(form, of, fixed, lambda op, *a: graph.call_function(op, a))
        y = graph.call_function(RUN, tuple(operands))
        y.meta = dict(end.meta)
        if form.factor != 1.0:
            y = graph.call_function(aten.mul.Tensor, (y, form.factor))
        if form.scan or self.y.dim() != 4:
            y = graph.call_function(aten.reshape.default, (y, list(self.y.shape)))
        if form.added is not None:
            constant = form.constant
            constant = fixed[constant] if isinstance(constant, int) else constant
            more = graph.call_function(aten.mul.Tensor, (of[form.added], constant))
            y = graph.call_function(aten.add.Tensor, (y, more))
        order = _order(self.y.dim(), self.axes[0])
        back = [order.index(axis) for axis in range(len(order))]
        return graph.call_function(aten.permute.default, (y, back))


def _call(operator: Any, *args: Any) -> Any:
    return operator(*args)


def _order(count: int, axes: tuple[int, int]) -> list[int]:
    return [*axes, *(axis for axis in range(count) if axis not in axes)]


def _fits(t: Tensor, scale: Tensor) -> bool:
    """Return whether t, broadcast, are the numbers of scale [B,S,...] at each row and token."""
    try:
        return near(torch.broadcast_to(t, scale.shape), scale)
    except RuntimeError:  # raised by torch for other shapes
        return False
