"""Questions to the solver z3: whether facts hold in a call, and in which one of the smallest."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import z3

from posenc_export.runtime.verification.entries import Tensor, Untranslated, alike

UNANSWERED = "(set-info :status unknown)"  # of a question as z3 writes it
EFFORT = 6_000_000  # of the solver for a claim, some 5 s, in its own unit


class Solver:
    """What is assumed of calls, and what follows from it.

    Args:
        log: a folder that gets each question, with its answer, in SMT-LIB 2.

    Attributes:
        assumed: what holds for sizes, and for each value of a function that was asked for.
    """

    def __init__(self, log: Optional[Path] = None) -> None:
        self.assumed: List[Any] = []
        self._log = log
        self._bounded: Dict[int, Any] = {}

    def function(self, name: str, promise: Callable[..., Any]) -> Any:
        """Return a function of integers, of which `promise` holds wherever it is asked for."""
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
        """Forget what is assumed within it."""
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

    def model(self, *facts: Any) -> Optional[z3.ModelRef]:
        """Return a call in which facts hold, or None if there is none. Raise Untranslated as
        `excludes`.
        """
        solver, result = self._checked(facts)
        return solver.model() if result == z3.sat else None

    def smallest(self, sizes: Sequence[Any], *facts: Any) -> Optional[z3.ModelRef]:
        """As `model`, with the smallest of each of the sizes, the first ones before the others, as
        far as the solver decides it.
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
                if found == z3.unknown:  # a larger call is a counterexample, too
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

    def _checked(self, facts: Sequence[Any]) -> Tuple[z3.Solver, z3.CheckSatResult]:
        solver = z3.Solver()
        solver.set("rlimit", EFFORT)
        solver.add(*self.assumed, *facts)
        result = solver.check()
        if self._log is not None:
            asked = len(list(self._log.iterdir())) + 1
            answer = f"(set-logic ALL)\n(set-info :status {result})"
            text = solver.to_smt2().replace(UNANSWERED, answer)
            (self._log / f"{asked:04}.smt2").write_text(text)
        if result == z3.unknown:
            raise Untranslated(f"not decided by the solver: {solver.reason_unknown()}")
        return solver, result
