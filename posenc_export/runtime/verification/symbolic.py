"""Values of a graph of integers as functions of symbolic sizes and indices, for the solver z3.

A tensor is its shape and a function that returns the entry at an index, so that one formula holds
for all sizes. Integers of the graph are unbounded here; claims.py bounds them with claims of their
own.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

import numpy as np
import z3

from posenc_export.runtime.graphs.onnx_nodes import Constant, Node
from posenc_export.runtime.verification.integer_graph import FLOATS
from posenc_export.runtime.verification.solver import (
    MALFORMED,
    Index,
    Score,
    Solver,
    Tensor,
    Untranslated,
    choose,
    reason_of,
)

Operator = Callable[..., Tensor]  # of a translation, a node, and its inputs
FEW = 64  # entries of a constant that are written out
STEPS = 512  # changes of an integer along a constant of one axis that are written out
TYPES = {1: "float", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "double", 16: "bfloat16"}


@dataclass
class Translation:
    """The values of nodes.

    Args:
        tensors: by name, of inputs; values are added to them.
        constants: of the graph.
        folder: of the external data of the graph.
        sums: known results of CumSum, ReduceSum, ReduceMax and ReduceMin: operator, what is added
            up, and the result.
        solver: answers questions on the calls.
        operators: translate nodes, by type (operators.py).
    """

    tensors: Dict[str, Tensor]
    constants: Dict[str, Constant]
    folder: Path
    sums: Sequence[Tuple[str, Tensor, Tensor]]
    solver: Solver
    operators: Mapping[str, Operator]
    # Functions without a definition, which a counterexample may choose other than the graph does
    free: Dict[str, Any] = field(default_factory=dict)
    reasons: Dict[str, str] = field(default_factory=dict)  # why a value is not translated

    def get(self, name: str) -> Tensor:
        """Return a value. Raise Untranslated if it has none."""
        if name not in self.tensors and name in self.constants:
            self.tensors[name] = self._constant(self.constants[name])
        if name not in self.tensors:
            raise Untranslated(self.reasons.get(name, f"{name} is not translated"))
        return self.tensors[name]

    def run(self, nodes: Sequence[Node]) -> None:
        """Translate nodes in order, and note the reason where one is not."""
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
                inside = all(0 <= i < size for i, size in pairs)  # else it is not chosen
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
        """Return the value of a function without a definition for integers or real numbers; kind:
        of the value, as numpy's."""
        sorts = [z3.RealSort() if z3.is_real(a) else z3.IntSort() for a in arguments]
        of = {"f": z3.RealSort(), "b": z3.BoolSort()}.get(kind, z3.IntSort())
        self.free.setdefault(name, z3.Function(name, *sorts, of))
        value = self.free[name](*arguments) if arguments else z3.Const(name, of)
        return Score(value) if kind == "f" else value
