"""Values of a graph as formulas of the solver z3, and questions to it: whether facts hold in any
call, and in which smallest one.

A tensor is its shape and a function that returns the entry at an index, so that one formula holds
for all sizes. Entries are integers, truth values, and floating-point numbers: real numbers with a
flag for -inf. Integers are unbounded here; claims.py proves bounds where casts need them.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence

import numpy as np
import z3

from posenc_export.runtime.graphs.onnx_nodes import Constant, Node
from posenc_export.runtime.verification.integer_graph import FLOATS
from posenc_export.shared.places import Operations

HIDDEN = -1e29  # scores of hidden keys are -inf, or -1e30 where a softmax over -inf would be NaN
Index = Sequence[Any]  # index of an entry: an int or an integer of z3 for each axis
Operator = Callable[..., "Tensor"]  # takes a translation, a node, and its inputs
UNANSWERED = "(set-info :status unknown)"  # line of a question that z3 writes
# The solver's two procedures for arithmetic, each with a limit in the solver's own unit (16 million
# take some 4 s). Each decides in milliseconds some questions for which the other takes seconds.
ATTEMPTS = ((6, 1_000_000), (2, 16_000_000), (6, 16_000_000))
FEW = 64  # entries of a constant that are written out
STEPS = 512  # changes of an integer along a constant of one axis that are written out
TYPES = {1: "float", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "double", 16: "bfloat16"}


class Score(NamedTuple):
    """A floating-point number."""

    value: Any  # a real number of z3; without meaning if it is hidden
    hidden: Any = False  # whether it is below HIDDEN, a bool or a truth value of z3


class Tensor:
    """Entries of a value of a graph.

    Args:
        shape: sizes, int or integers of z3.
        at: returns the entry at an index within the shape: an integer or truth value of z3, a
            number of Python, or a Score.

    Attributes:
        made: the function `at`; the method of this name keeps its results.
        source: a tensor with the same entries in the same order, which this one reshapes, or None.
    """

    source: Optional["Tensor"] = None

    def __init__(self, shape: Sequence[Any], at: Callable[[Index], Any]) -> None:
        self.shape = tuple(simplified(size) for size in shape)
        self.made, self._known = at, dict[tuple[int, ...], tuple[Any, Index]]()

    def at(self, index: Index) -> Any:
        """Return the entry at an index."""
        pairs = zip(self.shape, index, strict=True)
        index = [0 if isinstance(size, int) and size == 1 else i for size, i in pairs]
        key = tuple(i if isinstance(i, int) else ~i.get_id() for i in index)
        if key not in self._known:  # the index is kept, so that its id is not given to another
            self._known[key] = self.made(index), index
        return self._known[key][0]


class Untranslated(Exception):
    """The reason why a value is not translated, or a question not decided."""


# Errors of a translation, also of graphs that no runtime would load.
MALFORMED: tuple[Any, ...] = (
    Untranslated,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
)
MALFORMED += (TypeError, ValueError, z3.Z3Exception)


def reason_of(error: Exception) -> str:
    """Return why a value is not translated, or a question not decided."""
    if isinstance(error, Untranslated):
        return str(error)
    return f"not translated, as an operator has inputs that it cannot have: {type(error).__name__}"


def simplified(number: Any) -> Any:
    """Return an integer as an int if it is a numeral."""
    if isinstance(number, (int, np.integer)):
        return int(number)
    number = z3.simplify(number)
    return number.as_long() if z3.is_int_value(number) else number


def choose(condition: Any, x: Any, y: Any) -> Any:
    """Return x if a condition holds, and y otherwise."""
    if isinstance(condition, (bool, np.bool_)):
        return x if condition else y
    if isinstance(x, (Score, float)) or isinstance(y, (Score, float)):
        x, y = real(x), real(y)
        return Score(z3.If(condition, x.value, y.value), choose(condition, x.hidden, y.hidden))
    if isinstance(x, bool) and isinstance(y, bool):
        return x if x == y else condition if x else z3.Not(condition)
    return z3.If(condition, x, y)


def both(x: Any, y: Any) -> Any:
    """Return whether both conditions hold."""
    if isinstance(x, (bool, np.bool_)) or isinstance(y, (bool, np.bool_)):
        return (y if x else False) if isinstance(x, (bool, np.bool_)) else (x if y else False)
    return z3.And(x, y)


def negated(x: Any) -> Any:
    """Return whether a condition does not hold."""
    return not x if isinstance(x, (bool, np.bool_)) else z3.Not(x)


def either(x: Any, y: Any) -> Any:
    """Return whether one of two conditions holds."""
    return negated(both(negated(x), negated(y)))


def divided(x: Any, y: Any) -> Any:
    """Return the quotient of a whole number by one above 0, rounded down."""
    return x // y if isinstance(x, int) and isinstance(y, int) else x / y


SOLVER = Operations(both, either, negated, choose, divided, lambda x, y: x % y)


def real(x: Any) -> Score:
    """Return a number as a Score."""
    if isinstance(x, Score):
        return x
    if isinstance(x, float):
        return Score(z3.RealVal(0), True) if x < HIDDEN else Score(z3.RealVal(str(Fraction(x))))
    return Score(z3.ToReal(whole_number(x)) if z3.is_expr(x) else z3.RealVal(int(x)))


def whole_number(x: Any) -> Any:
    """Return a truth value, or a number without its fraction, as an integer."""
    if isinstance(x, Score):
        if x.hidden is not False:
            raise Untranslated("a whole number of a score that may be -inf")
        down = z3.ToInt(x.value)
        return z3.If(x.value >= 0, down, -z3.ToInt(-x.value))
    if isinstance(x, (bool, np.bool_, float)):
        return int(x)
    return z3.If(x, 1, 0) if z3.is_bool(x) else x


def truth(x: Any) -> Any:
    """Return a value as true or false."""
    if isinstance(x, Score):
        return either(x.hidden, x.value != 0)
    return x if isinstance(x, (bool, np.bool_)) or z3.is_bool(x) else x != 0


def alike(x: Any, y: Any) -> bool:
    """Return whether two sizes are written alike."""
    if isinstance(x, int) or isinstance(y, int):
        return isinstance(x, int) and isinstance(y, int) and x == y
    return bool(x.eq(y))


class Solver:
    """Facts that are assumed of calls, and questions about what follows from them.

    Args:
        log: folder for the questions, with their answers, in SMT-LIB 2.

    Attributes:
        assumed: facts about sizes, and about each value of a function that was used so far.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.assumed: list[Any] = []
        self._log = log
        self._bounded: dict[int, Any] = {}

    def function(self, name: str, promise: Callable[..., Any]) -> Any:
        """Return a function of integers. promise: a fact that is assumed for each value in use."""
        of = z3.Function(name, *[z3.IntSort()] * (promise.__code__.co_argcount - 1), z3.IntSort())

        def at(*index: Any) -> Any:
            value = of(*index)
            if value.get_id() not in self._bounded:
                self._bounded[value.get_id()] = value
                self.assumed.append(promise(value, *index))
            return value

        return at

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Drop facts at the end of the context that were assumed within it."""
        assumed, bounded = list(self.assumed), dict(self._bounded)
        try:
            yield
        finally:
            self.assumed[:], self._bounded = assumed, bounded

    def excludes(self, *facts: Any) -> bool:
        """Return whether facts hold in no call. Raise Untranslated if the solver does not decide
        it.
        """
        return self._checked(facts)[1] == z3.unsat

    def equal(self, x: Any, y: Any) -> bool:
        """Return whether two sizes are equal in every call. Raise Untranslated as `excludes`."""
        if isinstance(x, int) and isinstance(y, int):
            return x == y
        return alike(x, y) or self.excludes(x != y)

    def model(self, *facts: Any) -> z3.ModelRef | None:
        """Return a call in which facts hold, or None if there is none. Raise Untranslated as
        `excludes`.
        """
        return self.smallest((), *facts)

    def smallest(self, sizes: Sequence[Any], *facts: Any) -> z3.ModelRef | None:
        """As `model`, with sizes as small as the solver can decide; the first size is minimized
        first.
        """
        solver, result = self._checked(facts)
        if result != z3.sat:
            return None
        model = solver.model()
        for size in sizes:
            low, high = 0, model.eval(z3.IntVal(0) + size, True).as_long()
            while low < high:
                middle = (low + high) // 2
                found = solver.check(size <= middle)
                if found == z3.unknown:  # the call found so far is a counterexample, too
                    return model
                if found == z3.sat:
                    model = solver.model()
                    high = model.eval(size, True).as_long()
                else:
                    low = middle + 1
            solver.add(size <= high)
        return model

    def same(self, x: Tensor, y: Tensor) -> bool:
        """Return whether two values are equal at all indices within their shape."""
        index = [z3.Int(f"index {axis}") for axis in range(len(x.shape))]
        bounds = [z3.And(i >= 0, i < size) for i, size in zip(index, x.shape, strict=True)]
        differ = [a != b for a, b in zip(x.shape, y.shape, strict=True)]
        unequal = z3.Or(*differ, x.at(index) != y.at(index))
        try:
            return self.excludes(*bounds, unequal)
        except Untranslated:
            return False

    def _checked(self, facts: Sequence[Any]) -> tuple[z3.Solver, z3.CheckSatResult]:
        for arithmetic, effort in ATTEMPTS:
            solver = z3.Solver()
            solver.set("arith.solver", arithmetic)
            solver.set("rlimit", effort)
            solver.add(*self.assumed, *facts)
            result = solver.check()
            if result != z3.unknown:
                break
        if self._log is not None:
            asked = len(list(self._log.iterdir())) + 1
            answer = f"(set-logic ALL)\n(set-info :status {result})"
            text = solver.to_smt2().replace(UNANSWERED, answer)
            (self._log / f"{asked:04}.smt2").write_text(text)
        if result == z3.unknown:
            raise Untranslated(f"not decided by the solver: {solver.reason_unknown()}")
        return solver, result


@dataclass
class Translation:
    """The values of nodes.

    Args:
        tensors: by name, of inputs; those of nodes are added.
        constants: of the graph.
        folder: of the external data of the graph.
        sums: known results of CumSum, ReduceSum, ReduceMax and ReduceMin: operator, input and
            result.
        solver: answers questions on the calls.
        operators: translate nodes, by type (operators.py).
    """

    tensors: dict[str, Tensor]
    constants: dict[str, Constant]
    folder: Path
    sums: Sequence[tuple[str, Tensor, Tensor]]
    solver: Solver
    operators: dict[str, Operator]
    # Functions without a definition, for which a counterexample may choose other numbers
    free: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # why a value is not translated

    def get(self, name: str) -> Tensor:
        """Return the tensor of a value. Raise Untranslated if it was not translated."""
        if name not in self.tensors and name in self.constants:
            self.tensors[name] = self._constant(self.constants[name])
        if name not in self.tensors:
            raise Untranslated(self.reasons.get(name, f"{name} is not translated"))
        return self.tensors[name]

    def run(self, nodes: Sequence[Node]) -> None:
        """Translate nodes in order, and record the reason for those that cannot be translated."""
        for node in nodes:
            operator = self.operators.get(node.operator)
            try:
                if operator is None or node.domain not in ("", "ai.onnx"):
                    raise Untranslated(f"operator {node.operator} is not translated")
                inputs = [self.get(name) if name else None for name in node.inputs]
                self.tensors[node.outputs[0]] = operator(self, node, *inputs)
            except MALFORMED as reason:
                self.reasons.update(dict.fromkeys(node.outputs, reason_of(reason)))

    def _constant(self, constant: Constant) -> Tensor:
        if constant.element not in (*FLOATS, *TYPES.values()):
            raise Untranslated(f"a constant of {constant.element}")
        numbers = constant.array(self.folder)
        if not numbers.size:
            return Tensor(numbers.shape, lambda index: 0)
        if (numbers == numbers.flat[0]).all():
            same = numbers.flat[0].item()
            return Tensor(numbers.shape, lambda index: same)
        axes = [axis for axis, size in enumerate(numbers.shape) if size > 1]
        listed = numbers.reshape(-1)
        steps = np.diff(listed) if numbers.dtype.kind == "i" and len(axes) == 1 else None
        places = [] if steps is None else (np.flatnonzero(steps) + 1).tolist()

        def at(index: Index) -> Any:
            if all(isinstance(i, int) for i in index):
                pairs = zip(index, numbers.shape, strict=True)
                inside = all(0 <= i < size for i, size in pairs)  # others are not chosen
                return numbers[tuple(index)].item() if inside else 0
            if steps is not None and (steps == steps[0]).all():
                return listed[0].item() + steps[0].item() * index[axes[0]]
            if steps is not None and len(places) <= STEPS:
                taken = [z3.If(index[axes[0]] >= n, steps[n - 1].item(), 0) for n in places]
                return z3.Sum(listed[0].item(), *taken)
            if numbers.size <= FEW:
                value = listed[-1].item()
                for place in np.ndindex(numbers.shape):
                    pairs = zip(index, place, strict=True)
                    here = z3.And(*(i == p for i, p in pairs if not isinstance(i, int) or i != p))
                    value = choose(here, numbers[place].item(), value)
                return value
            return self.undefined(constant.name, index, numbers.dtype.kind)

        return Tensor(numbers.shape, at)

    def undefined(self, name: str, arguments: Sequence[Any], kind: str = "f") -> Any:
        """Return the value of a function without a definition for integers or real numbers. kind:
        kind of its dtype, as in numpy."""
        sorts = [z3.RealSort() if z3.is_real(a) else z3.IntSort() for a in arguments]
        of = {"f": z3.RealSort(), "b": z3.BoolSort()}.get(kind, z3.IntSort())
        self.free.setdefault(name, z3.Function(name, *sorts, of))
        value = self.free[name](*arguments) if arguments else z3.Const(name, of)
        return Score(value) if kind == "f" else value
