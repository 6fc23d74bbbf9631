"""Values of a graph of integers as functions of symbolic sizes and indices, for the solver z3.

A tensor is its shape and a function that returns the entry at an index, so that one formula holds
for all sizes. Integers of the graph are unbounded here; claims.py bounds them with claims of their
own. An operator whose result is known only as equal for equal inputs is a function without a
definition.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import z3

from posenc_export.runtime.graphs.onnx_nodes import Constant, Node
from posenc_export.runtime.verification.entries import (
    HIDDEN,
    MALFORMED,
    Index,
    Score,
    Tensor,
    Untranslated,
    alike,
    both,
    choose,
    either,
    negated,
    real,
    reason_of,
    simplified,
    truth,
    whole_number,
)
from posenc_export.runtime.verification.integer_graph import FLOATS

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
        sums: known results of CumSum, ReduceSum and ReduceMax: operator, what is added up, and the
            result.
        same: returns whether two entries are equal at all indices within a shape.
    """

    tensors: Dict[str, Tensor]
    constants: Dict[str, Constant]
    folder: Path
    sums: Sequence[Tuple[str, Tensor, Tensor]]
    same: Callable[[Tensor, Tensor], bool]
    # Functions without a definition, which a counterexample may choose other than the graph does
    free: Dict[str, Any] = field(default_factory=dict)
    reasons: Dict[str, str] = field(default_factory=dict)  # why a value is not translated
    operators: Mapping[str, Callable[..., Tensor]] = field(default_factory=lambda: OPERATORS)

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


def whole(tensor: Tensor) -> List[Any]:
    """Return the entries of a tensor of one axis, such as a shape."""
    if not tensor.shape:
        return [simplified(tensor.at(()))]
    if len(tensor.shape) != 1 or not isinstance(tensor.shape[0], int) or tensor.shape[0] > FEW:
        raise Untranslated("a shape with a number of axes that is not known")
    return [simplified(tensor.at((i,))) for i in range(tensor.shape[0])]


def _known(tensor: Optional[Tensor], default: Sequence[int] = ()) -> List[int]:
    """Return entries that must be numbers, such as axes."""
    entries = list(default) if tensor is None else whole(tensor)
    if not all(isinstance(entry, int) for entry in entries):
        raise Untranslated("axes that depend on a size")
    return entries


def broadcast(function: Callable[..., Any], *tensors: Tensor) -> Tensor:
    """Return a function of the entries of tensors."""
    rank = max(len(t.shape) for t in tensors)
    shapes = [(1,) * (rank - len(t.shape)) + t.shape for t in tensors]
    shape = []
    for sizes in zip(*shapes, strict=True):
        others = [size for size in sizes if not (isinstance(size, int) and size == 1)]
        shape.append(others[0] if others else 1)

    def at(index: Index) -> Any:
        entries = []
        for tensor in tensors:
            places = []
            for axis, size in enumerate(tensor.shape, rank - len(tensor.shape)):
                i = index[axis]
                if not isinstance(size, int) and not alike(size, shape[axis]):
                    i = choose(size == 1, 0, i)
                places.append(i)
            entries.append(tensor.at(places))
        return function(*entries)

    return Tensor(shape, at)


def _element_wise(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def operator(context: Translation, node: Node, *tensors: Tensor) -> Tensor:
        return broadcast(function, *tensors)

    return operator


def _folded(function: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    """Return an operator of any number of inputs."""

    def operator(context: Translation, node: Node, *tensors: Tensor) -> Tensor:
        result = tensors[0]
        for tensor in tensors[1:]:
            result = broadcast(function, result, tensor)
        return result

    return operator


def _numbers(function: Callable[[Any, Any], Any], hides: bool = False) -> Callable[[Any, Any], Any]:
    """Return a function of two numbers; hides: whether -inf plus a number is -inf."""

    def of(x: Any, y: Any) -> Any:
        if isinstance(x, (Score, float)) or isinstance(y, (Score, float)):
            x, y = real(x), real(y)
            hidden = either(x.hidden, y.hidden)
            if hidden is not False and not hides:
                raise Untranslated("a comparison or product of a score that may be -inf")
            value = function(x.value, y.value)
            return Score(value, hidden) if z3.is_arith(value) else value
        return function(whole_number(x), whole_number(y))

    return of


def _quotient(x: Any, y: Any) -> Any:
    """Divide, integers rounded towards zero."""
    if isinstance(x, (Score, float)) or isinstance(y, (Score, float)):
        return _numbers(lambda a, b: a / b)(x, y)
    if isinstance(x, int) and isinstance(y, int):
        return int(math.copysign(abs(x) // abs(y), x * y)) if x else 0
    if not isinstance(y, int) or y <= 0:
        raise Untranslated("a quotient of integers by another than a positive constant")
    return z3.If(x >= 0, x / y, -((-x) / y))


def _remainder(context: Translation, node: Node, x: Tensor, y: Tensor) -> Tensor:
    def of(a: Any, b: Any) -> Any:
        if not isinstance(b, int) or b <= 0 or node.attributes.get("fmod"):
            raise Untranslated("a remainder by another than a positive constant")
        return a % b

    return broadcast(of, x, y)


def _larger(x: Any, y: Any) -> Any:
    return z3.If(x >= y, x, y) if z3.is_expr(x) or z3.is_expr(y) else max(x, y)


def _smaller(x: Any, y: Any) -> Any:
    return z3.If(x <= y, x, y) if z3.is_expr(x) or z3.is_expr(y) else min(x, y)


def _largest(x: Any, y: Any) -> Any:
    """Return the larger of two numbers, of which one may be -inf if it is constant."""
    for number, other in ((x, y), (y, x)):
        if isinstance(number, float) and number < HIDDEN:
            return other
    return _numbers(_larger)(x, y)


def _clip(context: Translation, node: Node, x: Tensor, *bounds: Optional[Tensor]) -> Tensor:
    for bound, function in zip(bounds, (_largest, _numbers(_smaller)), strict=False):
        x = x if bound is None else broadcast(function, x, bound)
    return x


def _cast(context: Translation, node: Node, x: Tensor) -> Tensor:
    to = TYPES.get(node.attributes["to"], "")
    if not to:
        raise Untranslated(f"a cast to type {node.attributes['to']}")
    function = real if to in (*FLOATS, "double") else truth if to == "bool" else whole_number
    return broadcast(function, x)


def _floor(x: Any) -> Any:
    if real(x).hidden is not False:
        raise Untranslated("a whole number of a score that may be -inf")
    return Score(z3.ToReal(z3.ToInt(real(x).value)))


def _function(context: Translation, node: Node, *tensors: Tensor) -> Tensor:
    """Translate a function of real numbers without a definition."""

    def of(*entries: Any) -> Any:
        return context.undefined(node.operator, [real(entry).value for entry in entries])

    return broadcast(of, *tensors)


def _weighted(context: Translation, node: Node, x: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
    """Translate a product with weights, or that plus a bias, without a definition."""
    size = weights.shape[-2 if node.attributes.get("transB") else -1]
    name = node.outputs[0]
    return Tensor([*x.shape[:-1], size], lambda index: context.undefined(name, index))


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def _unsqueeze(context: Translation, node: Node, x: Tensor, axes: Tensor) -> Tensor:
    rank = len(x.shape) + len(_known(axes))
    added = {_axis(axis, rank) for axis in _known(axes)}
    sizes = iter(x.shape)
    shape = [1 if axis in added else next(sizes) for axis in range(rank)]
    return Tensor(shape, lambda i: x.at([e for axis, e in enumerate(i) if axis not in added]))


def _squeeze(context: Translation, node: Node, x: Tensor, axes: Optional[Tensor] = None) -> Tensor:
    ones = [axis for axis, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    gone = {_axis(axis, len(x.shape)) for axis in _known(axes, ones)}

    def at(index: Index) -> Any:
        given = iter(index)
        return x.at([0 if axis in gone else next(given) for axis in range(len(x.shape))])

    return Tensor([size for axis, size in enumerate(x.shape) if axis not in gone], at)


def _product(sizes: Sequence[Any]) -> Any:
    return simplified(math.prod(sizes))


def _reshape(context: Translation, node: Node, x: Tensor, shape: Tensor) -> Tensor:
    sizes = whole(shape)
    if not node.attributes.get("allowzero"):
        sizes = [x.shape[k] if isinstance(n, int) and n == 0 else n for k, n in enumerate(sizes)]
    if any(isinstance(n, int) and n == -1 for n in sizes):
        rest = [n for n in sizes if not (isinstance(n, int) and n == -1)]
        left = list(x.shape)
        for size in rest:  # sizes that are written alike are left out of the quotient
            match = next((k for k, n in enumerate(left) if alike(n, size)), None)
            if match is None:
                left.append(None)
            else:
                left.pop(match)
        if None in left:
            total, others = _product(x.shape), _product(rest)
            if not isinstance(total, int) or not isinstance(others, int):
                raise Untranslated("a shape with a size that is not known")
            left = [total // others]
        sizes = [_product(left) if isinstance(n, int) and n == -1 else n for n in sizes]
    # Axes of one entry are left out; equal axes before and after the others stay as they are.
    old = [k for k, n in enumerate(x.shape) if not (isinstance(n, int) and n == 1)]
    new = [k for k, n in enumerate(sizes) if not (isinstance(n, int) and n == 1)]
    before, after = [], []
    while old and new and alike(x.shape[old[0]], simplified(sizes[new[0]])):
        before.append((old.pop(0), new.pop(0)))
    while old and new and alike(x.shape[old[-1]], simplified(sizes[new[-1]])):
        after.append((old.pop(), new.pop()))

    def at(index: Index) -> Any:
        places: List[Any] = [0] * len(x.shape)
        for to, of in (*before, *after):
            places[to] = index[of]
        count: Any = 0
        for axis in new:
            count = count * sizes[axis] + index[axis]
        for axis in reversed(old[1:]):
            places[axis], count = count % x.shape[axis], _over(count, x.shape[axis])
        for axis in old[:1]:
            places[axis] = count
        return x.at(places)

    return Tensor(sizes, at)


def _over(x: Any, y: Any) -> Any:
    return x // y if isinstance(x, int) and isinstance(y, int) else x / y


def _transpose(context: Translation, node: Node, x: Tensor) -> Tensor:
    order = node.attributes.get("perm", list(reversed(range(len(x.shape)))))

    def at(index: Index) -> Any:
        return x.at([index[order.index(axis)] for axis in range(len(order))])

    return Tensor([x.shape[axis] for axis in order], at)


def _expand(context: Translation, node: Node, x: Tensor, shape: Tensor) -> Tensor:
    return broadcast(lambda a, b: a, x, Tensor(whole(shape), lambda index: 0))


def _concat(context: Translation, node: Node, *parts: Tensor) -> Tensor:
    axis = _axis(node.attributes["axis"], len(parts[0].shape))
    joined = parts[0]
    for part in parts[1:]:
        joined = _joined(joined, part, axis)
    return joined


def _joined(x: Tensor, y: Tensor, axis: int) -> Tensor:
    border = x.shape[axis]

    def at(index: Index) -> Any:
        i = index[axis]
        behind = [*index[:axis], i - border, *index[axis + 1 :]]
        if isinstance(i, int) and isinstance(border, int):
            return x.at(index) if i < border else y.at(behind)
        return choose(i < border, x.at(index), y.at(behind))

    return Tensor([*x.shape[:axis], border + y.shape[axis], *x.shape[axis + 1 :]], at)


def _slice(
    context: Translation,
    node: Node,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Optional[Tensor] = None,
    steps: Optional[Tensor] = None,
) -> Tensor:
    first, last = whole(starts), whole(ends)
    places = _known(axes, range(len(first)))
    if any(step != 1 for step in _known(steps, [1] * len(first))):
        raise Untranslated("a slice with steps")
    shape, offset = list(x.shape), [0] * len(x.shape)
    for begin, end, axis in zip(first, last, places, strict=True):
        axis, size = _axis(axis, len(x.shape)), x.shape[_axis(axis, len(x.shape))]
        begin, end = _bounded(begin, size), _bounded(end, size)
        shape[axis], offset[axis] = _larger(end - begin, 0), begin

    return Tensor(shape, lambda index: x.at([i + o for i, o in zip(index, offset, strict=True)]))


def _bounded(place: Any, size: Any) -> Any:
    """Return a start or an end within an axis, counted from its end if it is below 0."""
    if isinstance(place, int) and place >= 1 << 31:
        return size
    if isinstance(place, int) and place == 0:
        return 0
    place = choose(place < 0, place + size, place)
    return simplified(_smaller(_larger(place, 0), size))


def _wrapped(place: Any, size: Any) -> Any:
    """Return an index that counts from the end of an axis if it is below 0."""
    return choose(place < 0, place + size, place)


def _gather(context: Translation, node: Node, x: Tensor, at: Tensor) -> Tensor:
    axis, rank = _axis(node.attributes.get("axis", 0), len(x.shape)), len(at.shape)

    def entry(index: Index) -> Any:
        place = _wrapped(whole_number(at.at(index[axis : axis + rank])), x.shape[axis])
        return x.at([*index[:axis], place, *index[axis + rank :]])

    return Tensor([*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]], entry)


def _gather_nd(context: Translation, node: Node, x: Tensor, at: Tensor) -> Tensor:
    depth, outer = at.shape[-1], len(at.shape) - 1
    if node.attributes.get("batch_dims") or not isinstance(depth, int):
        raise Untranslated("rows of several tables")

    def entry(index: Index) -> Any:
        places = [whole_number(at.at([*index[:outer], axis])) for axis in range(depth)]
        pairs = zip(places, x.shape, strict=False)
        return x.at([*(_wrapped(place, size) for place, size in pairs), *index[outer:]])

    return Tensor([*at.shape[:-1], *x.shape[depth:]], entry)


def _gather_elements(context: Translation, node: Node, x: Tensor, at: Tensor) -> Tensor:
    axis = _axis(node.attributes.get("axis", 0), len(x.shape))

    def entry(index: Index) -> Any:
        place = _wrapped(at.at(index), x.shape[axis])
        return x.at([*index[:axis], place, *index[axis + 1 :]])

    return Tensor(at.shape, entry)


def _pad(
    context: Translation,
    node: Node,
    x: Tensor,
    pads: Tensor,
    value: Optional[Tensor] = None,
    axes: Optional[Tensor] = None,
) -> Tensor:
    if node.attributes.get("mode", "constant") != "constant":
        raise Untranslated("padding with other than a constant")
    rank, counts = len(x.shape), whole(pads)
    padded = [_axis(axis, rank) for axis in _known(axes, range(rank))]
    before, shape = [0] * rank, list(x.shape)
    ends = zip(padded, counts[: len(padded)], counts[len(padded) :], strict=True)
    for axis, first, last in ends:
        before[axis], shape[axis] = first, x.shape[axis] + first + last
    fill = 0 if value is None else whole(value)[0]

    def at(index: Index) -> Any:
        places = [i - b for i, b in zip(index, before, strict=True)]
        inside: Any = True
        for axis in padded:
            within = both(places[axis] >= 0, places[axis] < x.shape[axis])
            inside = both(inside, within)
        return choose(inside, x.at(places), fill) if inside is not False else fill

    return Tensor(shape, at)


def _range(context: Translation, node: Node, *ends: Tensor) -> Tensor:
    start, limit, step = (end.at(()) for end in ends)
    floats = any(isinstance(end, (Score, float)) for end in (start, limit, step))
    first, last, by = (simplified(whole_number(end)) for end in (start, limit, step))
    if not isinstance(by, int) or by != 1:
        raise Untranslated("a range with steps")
    entry = (lambda index: real(first + index[0])) if floats else (lambda index: first + index[0])
    return Tensor([_larger(last - first, 0)], entry)


def _filled(context: Translation, node: Node, shape: Tensor) -> Tensor:
    value = node.attributes.get("value")
    fill = 0.0 if value is None else value.array(context.folder).item()
    return Tensor(whole(shape), lambda index: fill)


def _shape(context: Translation, node: Node, x: Tensor) -> Tensor:
    rank = len(x.shape)
    start = _axis(node.attributes.get("start", 0), rank)
    sizes = x.shape[start : _axis(node.attributes.get("end", rank), rank)]

    def at(index: Index) -> Any:
        value = sizes[-1]
        for place, size in enumerate(sizes[:-1]):
            value = choose(index[0] == place, size, value)
        return value

    return Tensor([len(sizes)], at)


def _scatter(context: Translation, node: Node, x: Tensor, new: Tensor, first: Tensor) -> Tensor:
    """TensorScatter: x with new entries from an index of each row on."""
    axis = _axis(node.attributes.get("axis", -2), len(x.shape))
    if node.attributes.get("mode", "linear") != "linear":
        raise Untranslated("a circular cache")

    def at(index: Index) -> Any:
        place = index[axis] - first.at(index[:1])
        inside = both(place >= 0, place < new.shape[axis])
        return choose(inside, new.at([*index[:axis], place, *index[axis + 1 :]]), x.at(index))

    return Tensor(x.shape, at)


def _with_one(x: Tensor) -> Tensor:
    return Tensor([*x.shape, 1], lambda index: x.at(index[:-1]))


def _sum(context: Translation, node: Node, x: Tensor, axes: Optional[Tensor] = None) -> Tensor:
    """CumSum, ReduceSum or ReduceMax whose result is known for what it adds up."""
    cumulative, rank = node.operator == "CumSum", len(x.shape)
    given = _known(axes, node.attributes.get("axes", range(rank)))
    over = [_axis(axis, rank) for axis in given]
    if cumulative and (node.attributes.get("exclusive") or node.attributes.get("reverse")):
        raise Untranslated("a sum in another order")
    if context.same(broadcast(whole_number, x), Tensor(x.shape, lambda index: 0)):
        left = [axis for axis in range(rank) if axis not in over or cumulative]
        return Tensor([x.shape[axis] for axis in left], lambda index: 0)
    for operator, summed, result in context.sums:
        last = over == [len(summed.shape) - 1]
        if operator == node.operator and last and len(summed.shape) == rank:
            if context.same(broadcast(whole_number, x), summed):
                kept = cumulative or not node.attributes.get("keepdims", 1)
                return result if kept else _with_one(result)
    raise Untranslated(f"{node.operator} of values without a known sum")


FUNCTIONS: Tuple[str, ...] = ("Sin", "Cos", "Exp", "Log", "Sqrt", "Pow", "Ceil", "Sigmoid", "Tanh")
FUNCTIONS += ("Softplus", "Reciprocal")
OPERATORS: Dict[str, Callable[..., Tensor]] = {
    "Add": _element_wise(_numbers(lambda x, y: x + y, hides=True)),
    "Sub": _element_wise(_numbers(lambda x, y: x - y)),
    "Mul": _element_wise(_numbers(lambda x, y: x * y)),
    "Div": _element_wise(_quotient),
    "Mod": _remainder,
    "Max": _folded(_largest),
    "Min": _folded(_numbers(_smaller)),
    "Neg": _element_wise(lambda x: _numbers(lambda a, b: b - a)(x, 0)),
    "Abs": _element_wise(lambda x: _numbers(lambda a, b: _larger(a, b - a))(x, 0)),
    "Relu": _element_wise(lambda x: _numbers(_larger)(x, 0)),
    "Floor": _element_wise(_floor),
    "Equal": _element_wise(_numbers(lambda x, y: x == y)),
    "Less": _element_wise(_numbers(lambda x, y: x < y)),
    "LessOrEqual": _element_wise(_numbers(lambda x, y: x <= y)),
    "Greater": _element_wise(_numbers(lambda x, y: x > y)),
    "GreaterOrEqual": _element_wise(_numbers(lambda x, y: x >= y)),
    "And": _folded(lambda x, y: both(truth(x), truth(y))),
    "Or": _folded(lambda x, y: either(truth(x), truth(y))),
    "Not": _element_wise(lambda x: negated(truth(x))),
    "Where": _element_wise(lambda c, x, y: choose(truth(c), x, y)),
    "Identity": _element_wise(lambda x: x),
    "Cast": _cast,
    "Clip": _clip,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Expand": _expand,
    "Concat": _concat,
    "Slice": _slice,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "GatherElements": _gather_elements,
    "Pad": _pad,
    "Range": _range,
    "ConstantOfShape": _filled,
    "Shape": _shape,
    "Size": lambda context, node, x: Tensor([], lambda index: _product(x.shape)),
    "TensorScatter": _scatter,
    "CumSum": _sum,
    "ReduceSum": _sum,
    "ReduceMax": _sum,
    "MatMul": _weighted,
    "Gemm": _weighted,
    **dict.fromkeys(FUNCTIONS, _function),
}
