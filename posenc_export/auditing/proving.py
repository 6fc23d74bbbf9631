"""Claims on a graph of others that hold at every length, or the smallest call that refutes one:
which keys each query sees, and the position of each token. The solver z3 proves them, for any call
that an audit makes.

Shapes: B rows, S new tokens, P slots of caches, T = P + S keys of a call.
"""

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import z3

from posenc_export.auditing.facts import Claim, Facts
from posenc_export.auditing.inputs import Interface, NotPossible, Value
from posenc_export.runtime.graphs.onnx_nodes import Constant, Node, Nodes
from posenc_export.runtime.verification.any_call import values_of
from posenc_export.runtime.verification.integer_graph import attention_weights, without_bodies
from posenc_export.runtime.verification.operators import OPERATORS, broadcast
from posenc_export.runtime.verification.symbolic import (
    MALFORMED,
    SOLVER,
    Score,
    Solver,
    Tensor,
    Translation,
    Untranslated,
    alike,
    both,
    choose,
    negated,
    real,
    reason_of,
    truth,
)
from posenc_export.shared.places import evaluate

Entry = Callable[[Sequence[Any]], Any]
HIDES = -9000.0  # masks of exporters are at most so large, and scores are larger
NUMBERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
FEW = 8  # angles of a rotation that are proved one by one
TABLES = 8  # rows of a constant from which on it may be a table of positions
GROUPED = "GroupQueryAttention"


class ForeignCall:
    """The inputs of a graph as functions of any row, column and slot, as `feeds_of` makes them. The
    tokens of a row fill the slots from `pad` to `end`; the others are padding.

    Args:
        interface, facts: how many positions there are, and where sequences begin.

    Attributes:
        solver, tensors, sums: as of AnyCall.

    Raises:
        NotPossible: the inputs are others than those of a growing cache and a mask of tokens.
    """

    def __init__(self, interface: Interface, facts: Facts) -> None:
        if interface.capacity:
            raise NotPossible("caches of a fixed size")
        if any(cache.slots < 0 for cache in interface.caches):
            raise NotPossible("states that every call replaces")
        if any(cache.past.whole for cache in interface.caches):
            raise NotPossible("a cache of whole numbers")
        self.interface, self.solver = interface, Solver()
        self.rows, self.columns, self.slots = z3.Ints("B S P")
        self.row, self.column, self.slot = z3.Ints("row column slot")
        self.total = z3.simplify(self.slots + self.columns)
        self.solver.assumed += [self.rows >= 1, self.columns >= 1, self.slots >= 0]
        self.solver.assumed.append(self.total <= facts.positions)
        if not interface.caches:
            self.slots, self.total = z3.IntVal(0), self.columns
        for size, fixed in ((self.rows, interface.batch), (self.columns, interface.length)):
            self.solver.assumed += [size == fixed] if fixed else []
        P, T, padding = self.slots, self.total, interface.padding
        before = padding == "left" and (facts.causal or "position_ids" in interface.inputs)
        self.pad = self.solver.function(
            "pad", lambda n, b: z3.And(n >= 0, n < T, z3.Or(P == 0, n < P)) if before else n == 0
        )
        self.end = self.solver.function(
            "end",
            lambda n, b: (
                n == T
                if padding == "none"
                else z3.And(n > self.pad(b), n >= P, n <= T, padding == "left" or P == 0 or n == T)
            ),
        )
        moves, most = facts.starts and "position_ids" in interface.inputs, facts.positions
        self.first = self.solver.function(
            "first",
            lambda p, b: z3.And(p >= 0, moves or p == 0, p + self.end(b) - self.pad(b) <= most),
        )
        kept = Tensor((self.rows, T), lambda i: choose(self._is_token(*i), 1, 0))
        self.sums = [
            ("CumSum", kept, Tensor(kept.shape, lambda i: self._counted(*i))),
            ("ReduceSum", kept, Tensor((self.rows,), lambda i: self.end(i[0]) - self.pad(i[0]))),
        ]
        self.tensors = {value.name: self._fed(m, value) for m, value in interface.inputs.items()}
        for cache in interface.caches:
            sizes: dict[int, Any] = {cache.rows: self.rows, cache.slots: P}
            of = [sizes.get(k, n) for k, n in enumerate(cache.past.axes)]
            shape = [z3.Int(str(n)) if isinstance(n, str) or n is None else n for n in of]
            self.tensors[cache.past.name] = Tensor(shape, lambda index: Score(z3.RealVal(0)))

    def _is_token(self, b: Any, t: Any) -> Any:
        return both(t >= self.pad(b), t < self.end(b))

    def _counted(self, b: Any, t: Any) -> Any:
        """Return the number of tokens of a row up to a slot."""
        up = choose(t + 1 < self.end(b), t + 1, self.end(b)) - self.pad(b)
        return choose(up > 0, up, 0)

    def position(self, b: Any, t: Any) -> Any:
        """Return the position of the token in a slot; -1 for padding."""
        return choose(self._is_token(b, t), self.first(b) + t - self.pad(b), -1)

    def query(self, b: Any, i: Any) -> Any:
        """Return the position of a new token; -1 for padding."""
        return self.position(b, self.slots + i)

    def _fed(self, meaning: str, value: Value) -> Tensor:
        """Return an input."""
        B, S, P, T = self.rows, self.columns, self.slots, self.total
        meaning, rank = meaning.split(" ")[0], len(value.axes)
        known: Mapping[str, Any] = {
            "position_ids": ((B, S), lambda i: choose(self.query(*i) >= 0, self.query(*i), 0)),
            "attention_mask": ((B, T), lambda i: choose(self._is_token(*i), 1, 0)),
            "token_type_ids": ((B, S), lambda i: 0),
            "cache_position": ((S,), lambda i: P + i[0]),
            "past_length": ((), lambda i: P),
            "last_index": ((B,), lambda i: self.end(i[0]) - self.pad(i[0]) - 1),
            "first_position": ((B, 1), lambda i: self.first(i[0])),
            "total_length": ((), lambda i: T),
            "use_cache_branch": ((), lambda i: P > 0),
            "logits_to_keep": ((), lambda i: 0),
        }
        if meaning not in known or (meaning == "attention_mask" and rank != 2):
            open_axes = [B, S, *(z3.Int(str(axis)) for axis in value.axes[2:])]
            sizes = zip(value.axes, open_axes, strict=False)
            shape = [n if isinstance(n, int) else size for n, size in sizes]
            return Tensor(shape, values_of(value.name))
        sizes, entry = known[meaning]
        if rank < len(sizes) == 2:  # one row of all
            sizes, entry = sizes[1:], lambda i, of=entry: of((0, *i))
        added = rank - len(sizes)
        of_last: Entry = lambda i: entry(i[added:])  # noqa: E731
        whole = value.whole or value.dtype == "bool"
        return Tensor(
            [*(n if isinstance(n, int) else 1 for n in value.axes[:added]), *sizes],
            of_last if whole else lambda i: Score(z3.ToReal(of_last(i) + z3.IntVal(0))),
        )

    def rule(self, text: str) -> Any:
        """Return the value of a rule of positions for any row, column and slot."""
        b, i, t = self.row, self.column, self.slot
        return evaluate(text, {"q": self.query(b, i), "k": self.position(b, t)}, SOLVER)

    def within(self) -> list[Any]:
        """Return that row, column and slot are those of a token and a key."""
        pairs = ((self.row, self.rows), (self.column, self.columns), (self.slot, self.total))
        return [z3.And(index >= 0, index < size) for index, size in pairs]

    def smallest(self, *facts: Any) -> z3.ModelRef | None:
        """Return a call with the fewest keys, then the fewest new tokens, as Solver.smallest."""
        first = self.first(self.row)
        sizes = (self.total, self.columns, first, self.rows, self.row, self.column)
        return self.solver.smallest(sizes, *facts)

    def described(self, model: z3.ModelRef) -> dict[str, int]:
        """Return the call of a counterexample."""
        b, i, t = self.row, self.column, self.slot
        numbers = {
            "S": self.columns, "P": self.slots, "padding": self.pad(b), "end": self.end(b),
            "start": self.first(b), "column": i, "slot": t, "position": self.query(b, i),
            "position of the key": self.position(b, t),
        }  # fmt: skip
        return {name: model.eval(n + z3.IntVal(0), True).as_long() for name, n in numbers.items()}


def prove(graph: Nodes, interface: Interface, facts: Facts) -> list[Claim]:
    """Prove the claims on a graph, whose large constants have a shape alone."""
    try:
        call = ForeignCall(interface, facts)
    except NotPossible as reason:
        return [Claim("calls", "not proved", str(reason))]
    return list(_Proof(without_bodies(graph), call, facts).claims())


class _Foreign(Translation):
    """The values of a graph of others: constants of masks are -inf, whatever they are.

    Attributes:
        call: that the graph gets.
    """

    call: ForeignCall

    def _constant(self, constant: Constant) -> Tensor:
        if not constant.content and 0 not in constant.shape:  # too large
            kind = np.dtype(constant.element).kind if constant.element in NUMBERS else "f"
            name = constant.name
            return Tensor(constant.shape, lambda index: self.undefined(name, index, kind))
        of, scalar = super()._constant(constant), bool(constant.shape in ((), (1,)))
        if not scalar or constant.element not in ("float", "float16", "double"):
            return of
        number = of.at([0] * len(constant.shape))
        hides = isinstance(number, float) and number <= HIDES
        return Tensor(of.shape, lambda index: -np.inf) if hides else of


class _Proof:
    def __init__(self, graph: Nodes, call: ForeignCall, facts: Facts) -> None:
        self.graph, self.call, self.facts = graph, call, facts
        known = (dict(call.tensors), graph.constants, Path(), call.sums)
        self.values = _Foreign(*known, call.solver, ALL)
        self.values.call = call
        self.values.run(graph.nodes)

    def claims(self) -> Iterator[Claim]:
        """Yield what is proved, refuted or neither."""
        attentions = list(self._attentions())
        if not attentions:
            yield Claim("mask", "not proved", "no attention was found")
        rules = self.facts.rules
        if len(rules) == 1:
            rules = rules * len(attentions)
        for layer, hidden in enumerate(attentions):
            name = f"keys that layer {layer} sees"
            if len(rules) != len(attentions):
                count = f"{len(attentions)} attentions for {len(rules)} layers"
                yield Claim(name, "not proved", f"the graph has {count}")
                return
            if not rules[layer]:
                yield Claim(name, "not proved", "the reference declares no rule")
                continue
            yield self._tried(name, partial(self._sees, hidden, rules[layer]))
        yield from self._positions()

    def _tried(self, name: str, claim: Any) -> Claim:
        try:
            text, model = claim()
        except MALFORMED as error:
            return Claim(name, "not proved", reason_of(error))
        if model is None:
            return Claim(name, "proved", text)
        return Claim(name, "refuted", text, self.call.described(model))

    def _attentions(self) -> Iterator[Callable[[], Any]]:
        """Yield for each attention a function that returns whether a key is hidden."""
        weighted = attention_weights(self.graph)
        for node in self.graph.nodes:
            if node.operator == "Softmax" and node.outputs[0] in weighted:
                yield partial(self._hides, node.inputs[0])
            elif node.operator == "Attention" and not node.domain:
                yield partial(self._by_mask, node)
            elif node.operator == GROUPED:
                yield partial(self._grouped, node)

    def _index(self, tensor: Tensor) -> list[Any]:
        """Return the index of any query and key, of the row, and of any head."""
        call, rank = self.call, len(tensor.shape)
        heads = [z3.Int(f"head {axis}") for axis in range(rank - 3)]
        return [call.row, *heads, call.column, call.slot][-rank:]

    def _hides(self, name: str) -> Any:
        """Return whether a score, or an entry of a mask, hides a key."""
        tensor = self.values.get(name)
        entry = tensor.at(self._index(tensor))
        return real(entry).hidden if isinstance(entry, (Score, float)) else negated(truth(entry))

    def _by_mask(self, node: Node) -> Any:
        hidden: Any = self._hides(node.inputs[3]) if any(node.inputs[3:4]) else False
        if node.attributes.get("is_causal"):
            hidden = z3.Or(hidden, self.call.slot > self.call.column + self.call.slots)
        return hidden

    def _grouped(self, node: Node) -> Any:
        """Return the keys that GroupQueryAttention hides, by its contract: those behind the query
        and in front of its window, of as many as `seqlens_k` says.
        """
        call = self.call
        last = self.values.get(node.inputs[5])
        count = last.at([call.row, 0][: len(last.shape)]) + 1
        query = count - call.columns + call.column if call.interface.caches else call.column
        query = z3.If(call.slots == 0, call.column, query)
        hidden, size = call.slot > query, node.attributes.get("local_window_size", -1)
        return z3.Or(hidden, query - call.slot >= size) if size > 0 else hidden

    def _sees(self, hidden: Any, rule: str) -> tuple[str, Any]:
        call = self.call
        q, k = call.rule("q"), call.rule("k")
        expected = both(k >= 0, call.rule(rule))
        differs = z3.Xor(z3.Or(hidden()), z3.Not(expected))
        model = call.smallest(*call.within(), q >= 0, differs)
        if model is None:
            return f"each token sees the keys k where {rule}", None
        sees = "sees" if z3.is_false(model.eval(expected, True)) else "does not see"
        at = call.described(model)
        key = at["position of the key"]
        what = f"the key at position {key}" if key >= 0 else "a slot of padding"
        return f"the token at position {at['position']} {sees} {what}", model

    def _positions(self) -> Iterator[Claim]:
        """Prove the positions that rows of tables and angles are of."""
        known: dict[Any, str] = {}
        for node in self.graph.nodes:
            stored = self.graph.constants.get((node.inputs or [""])[0])
            if node.operator == "Gather" and stored is not None and self._is_table(stored, node):
                name = f"rows of {stored.name}"
                yield self._tried(name, partial(self._rows, node, stored))
            elif node.operator in ("Cos", "Sin") and node.inputs[0] not in known:
                known[node.inputs[0]] = name = f"angles of {node.inputs[0]}"
                if self._depends(node.inputs[0]):
                    if self.facts.whole:
                        why = "angles of the reference depend on the length of the sequence"
                        yield Claim(name, "not proved", why)
                    else:
                        yield self._tried(name, partial(self._angles, node))

    def _is_table(self, stored: Constant, node: Node) -> bool:
        floats = stored.element in ("float", "float16", "bfloat16", "double")
        rows = stored.shape[0] if stored.shape else 0
        large = floats and rows >= TABLES and not node.attributes.get("axis", 0)
        return large and self._depends(node.inputs[1])

    def _depends(self, name: str) -> bool:
        """Return whether a value is computed from positions, and not from tokens."""
        tensor = self.values.tensors.get(name)
        if tensor is None:
            return False
        try:
            return z3.is_expr(real(self._token(tensor)).value)
        except Untranslated as reason:
            return "depends on the values" not in str(reason)
        except MALFORMED:
            return True

    def _token(self, tensor: Tensor, *last: Any) -> Any:
        """Return the entry of any token, and of a number of its last axis."""
        call, axes = self.call, list[Any]()
        for size in tensor.shape[: len(tensor.shape) - len(last)]:
            if isinstance(size, int) and size == 1:
                axes.append(0)
            elif call.column not in axes and call.solver.equal(size, call.columns):
                axes.append(call.column)
            elif call.row not in axes and call.solver.equal(size, call.rows):
                axes.append(call.row)
            else:
                raise Untranslated("an axis that is not of rows or tokens")
        return tensor.at([*axes, *last])

    def _rows(self, node: Node, stored: Constant) -> tuple[str, Any]:
        call, q, rows = self.call, self.call.rule("q"), stored.shape[0]
        index, inside = self._token(self.values.get(node.inputs[1])), [*call.within(), q >= 0]
        start = call.smallest(*inside)
        shift = start.eval(index - q, True).as_long() if start is not None else 0
        model = call.smallest(*inside, index != q + shift)
        if model is not None:
            got, wanted = (model.eval(number, True) for number in (index, q + shift))
            return f"the token at position {wanted} reads the row of position {got}", model
        model = call.smallest(*inside, z3.Or(index < 0, index >= rows))
        if model is not None:
            return f"a row beyond the {rows} of {stored.name} is read", model
        return "each token reads the row of its position", None

    def _visible(self, *facts: Any) -> Any:
        """Return the smallest call in which facts hold, one behind cached keys if there is one: a
        rotation of all tokens of a row by the same angle changes nothing.
        """
        call = self.call
        from_zero = call.first(call.row) == 0
        for more in ([from_zero, call.slots >= 1], [from_zero], []):
            if (model := call.smallest(*facts, *more)) is not None:
                return model
        return None

    def _angles(self, node: Node) -> tuple[str, Any]:
        call, q = self.call, self.call.rule("q")
        tensor, inside = self.values.get(node.inputs[0]), [*call.within(), q >= 0]
        size = tensor.shape[-1]
        if not isinstance(size, int):
            raise Untranslated("angles of no known number")
        chosen = range(size) if size <= FEW else sorted({0, 1, size // 2 - 1, size // 2, size - 1})
        for number in chosen:
            angle = real(self._token(tensor, number)).value
            alone = [*inside, call.slots == 0, call.pad(call.row) == 0, call.first(call.row) == 0]
            at = [call.solver.model(*alone, q == position) for position in (0, 1)]
            if len(ends := [_fraction(m.eval(angle, True)) for m in at if m is not None]) < 2:
                raise Untranslated("a graph of one position")
            first, second = ends
            begin, step = z3.RealVal(str(first)), second - first
            model = self._visible(*inside, angle != begin + z3.RealVal(str(step)) * z3.ToReal(q))
            if model is not None:
                turned = _fraction(model.eval(angle, True)) - first
                got = float(turned / step) if step else 0
                position = model.eval(q, True)
                return f"the token at position {position} has the angles of position {got:g}", model
        return "each token has the angles of its position", None


def _fraction(number: Any) -> Fraction:
    if not z3.is_rational_value(number):
        raise Untranslated("an angle that depends on numbers that the solver chooses")
    return Fraction(number.as_fraction())


def _product(context: Translation, node: Node, x: Tensor, y: Tensor, *_: Tensor) -> Tensor:
    """Translate a product of matrices: of one column and one row entry by entry, as of angles."""
    if len(y.shape) < 2 or not (isinstance(x.shape[-1], int) and x.shape[-1] == 1):
        return OPERATORS["MatMul"](context, node, x, y)

    def turned(index: Sequence[Any]) -> Any:
        return y.at([*index[:-2], 0, index[-1]])

    left = Tensor([*x.shape[:-1], 1], lambda index: x.at([*index[:-1], 0]))
    right = Tensor([*y.shape[:-2], 1, y.shape[-1]], turned)
    return OPERATORS["Mul"](context, node, left, right)


def _scaled(context: Translation, node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Translate a product, of which one factor may be a mask's constant and the other 0 or 1."""

    def of(a: Any, b: Any) -> Any:
        a, b = (b, a) if isinstance(a, float) and a == -np.inf else (a, b)
        if isinstance(b, float) and b == -np.inf:
            return Score(z3.RealVal(0), z3.simplify(real(a).value > 0))
        return OPERATORS["Mul"](context, node, _entry_of(a), _entry_of(b)).at([])

    return broadcast(of, x, y)


def _entry_of(entry: Any) -> Tensor:
    return Tensor([], lambda index: entry)


def _gather(context: Any, node: Node, x: Tensor, at: Tensor) -> Tensor:
    """Translate a gather; of rows and columns that a reshape has joined, if the index is that of
    the row times their number and a column.
    """
    source, call = x.source or x, context.call
    joined = len(source.shape) == 2 and len(x.shape) == 2 and alike(x.shape[1], 1)
    if not joined or isinstance(source.shape[1], int) or node.attributes.get("axis", 0):
        return OPERATORS["Gather"](context, node, x, at)

    def entry(index: Sequence[Any]) -> Any:
        place, columns = at.at(index[: len(at.shape)]), source.shape[1]
        column = z3.simplify(place - call.row * columns, som=True)
        if call.solver.excludes(*call.within(), z3.Or(column < 0, column >= columns)):
            return source.at([call.row, column])
        raise Untranslated("a row and a column in one index")

    return Tensor([*at.shape, 1], entry)


ALL: dict[str, Any] = {**OPERATORS, "MatMul": _product, "Mul": _scaled, "Gather": _gather}
