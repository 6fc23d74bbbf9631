"""Any call that an audit makes of a graph of others, for the solver z3.

Shapes: B rows, S new tokens, P slots of caches, T = P + S keys.
"""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import z3

from posenc_export.auditing.claim import Question
from posenc_export.auditing.inputs import NotPossible, Value
from posenc_export.runtime.verification.any_call import values_of
from posenc_export.runtime.verification.entries import SOLVER, Score, Tensor, both, choose
from posenc_export.runtime.verification.solver import Solver
from posenc_export.shared.places import evaluate

Entry = Callable[[Sequence[Any]], Any]


class ForeignCall:
    """The inputs of a graph as functions of any row, column and slot, as `feeds_of` makes them. The
    tokens of a row fill the slots from `pad` to `end`; the others are padding.

    Args:
        question: how many positions there are, and where sequences begin.

    Attributes:
        solver, tensors, sums: as of AnyCall.

    Raises:
        NotPossible: the inputs are others than those of a growing cache and a mask of tokens.
    """

    def __init__(self, question: Question) -> None:
        interface, most, starts = question.interface, question.most, question.starts
        if interface.capacity or any(cache.slots < 0 for cache in interface.caches):
            raise NotPossible("caches of a fixed size")
        self.interface, self.solver = interface, Solver()
        self.rows, self.columns, self.slots = z3.Ints("B S P")
        self.row, self.column, self.slot = z3.Ints("row column slot")
        self.total = z3.simplify(self.slots + self.columns)
        self.solver.assumed += [self.rows >= 1, self.columns >= 1, self.slots >= 0]
        self.solver.assumed.append(self.total <= most)
        if not interface.caches:
            self.slots, self.total = z3.IntVal(0), self.columns
        for size, fixed in ((self.rows, interface.batch), (self.columns, interface.length)):
            self.solver.assumed += [size == fixed] if fixed else []
        P, T, padding = self.slots, self.total, interface.padding
        before = padding == "left" and question.padded
        self.pad = self.solver.function(
            "pad",
            lambda n, b: z3.And(n >= 0, n < T, z3.Or(P == 0, n < P)) if before else n == 0,
        )
        self.end = self.solver.function(
            "end",
            lambda n, b: (
                n == T
                if padding == "none"
                else z3.And(n > self.pad(b), n >= P, n <= T, padding == "left" or P == 0 or n == T)
            ),
        )
        moves = starts and "position_ids" in interface.inputs
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
            sizes: Dict[int, Any] = {cache.rows: self.rows, cache.slots: P}
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
        by_row = lambda of: ((B,), lambda i: of(i[0]))  # noqa: E731
        known: Mapping[str, Any] = {
            "position_ids": ((B, S), lambda i: choose(self.query(*i) >= 0, self.query(*i), 0)),
            "attention_mask": ((B, T), lambda i: choose(self._is_token(*i), 1, 0)),
            "token_type_ids": ((B, S), lambda i: 0),
            "cache_position": ((S,), lambda i: P + i[0]),
            "past_length": ((), lambda i: P),
            "last_index": by_row(lambda b: self.end(b) - self.pad(b) - 1),
            "first_position": ((B, 1), lambda i: self.first(i[0])),
            "total_length": ((), lambda i: T),
            "use_cache_branch": ((), lambda i: P > 0),
            "logits_to_keep": ((), lambda i: 0),
            "row_order": ((B,), lambda i: i[0]),
        }
        if meaning not in known or meaning == "attention_mask" and rank != 2:
            open_axes = [B, S, *(z3.Int(str(axis)) for axis in value.axes[2:])]
            sizes = zip(value.axes, open_axes, strict=False)
            shape = [n if isinstance(n, int) else size for n, size in sizes]
            return Tensor(shape, values_of(value.name))
        sizes, entry = known[meaning]
        while len(sizes) > rank and len(sizes) > 1:  # one row of all
            sizes, entry = sizes[1:], _of_row(entry)
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

    def within(self) -> List[Any]:
        """Return that row, column and slot are those of a token and a key."""
        pairs = ((self.row, self.rows), (self.column, self.columns), (self.slot, self.total))
        return [z3.And(index >= 0, index < size) for index, size in pairs]

    def smallest(self, *facts: Any) -> Optional[z3.ModelRef]:
        """Return a call with the fewest keys, then the fewest new tokens, as Solver.smallest."""
        first = self.first(self.row)
        sizes = (self.total, self.columns, first, self.rows, self.row, self.column)
        return self.solver.smallest(sizes, *facts)

    def described(self, model: z3.ModelRef) -> Dict[str, int]:
        """Return the call of a counterexample."""
        b, i, t = self.row, self.column, self.slot
        numbers = {
            "S": self.columns, "P": self.slots, "padding": self.pad(b), "end": self.end(b),
            "start": self.first(b), "column": i, "slot": t, "position": self.query(b, i),
            "position of the key": self.position(b, t),
        }  # fmt: skip
        return {name: model.eval(n + z3.IntVal(0), True).as_long() for name, n in numbers.items()}


def _of_row(entry: Entry) -> Entry:
    return lambda i: entry((0, *i))
