"""Translations of ONNX operators on symbolic indices (symbolic.py), for the solver z3.

Of some operators, only one fact is used: results are equal for equal inputs. A function without a
definition stands for them.
"""

import math
from contextlib import suppress
from functools import reduce
from typing import Any, Callable, Mapping, Sequence

import z3

from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.verification.integer_graph import FLOATS
from posenc_export.runtime.verification.symbolic import (
    FEW,
    HIDDEN,
    TYPES,
    Index,
    Operator,
    Score,
    Tensor,
    Translation,
    Untranslated,
    alike,
    both,
    choose,
    divided,
    either,
    negated,
    real,
    simplified,
    truth,
    whole_number,
)


def whole(tensor: Tensor) -> list[Any]:
    """Return the entries of a tensor of one axis, such as a shape."""
    if not tensor.shape:
        return [simplified(tensor.at(()))]
    if len(tensor.shape) != 1 or not isinstance(tensor.shape[0], int) or tensor.shape[0] > FEW:
        raise Untranslated("a shape with a number of axes that is not known")
    return [simplified(tensor.at((i,))) for i in range(tensor.shape[0])]


def _known(tensor: Tensor | None, default: Sequence[int] = ()) -> list[int]:
    """Return the entries of a tensor that must be constant, such as axes."""
    entries = list(default) if tensor is None else whole(tensor)
    if not all(isinstance(entry, int) for entry in entries):
        raise Untranslated("axes that depend on a size")
    return entries


def broadcast(function: Callable[..., Any], *tensors: Tensor) -> Tensor:
    """Return the tensor of a function of the entries of tensors, which are broadcast."""
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
    """Return an operator that applies a function of two inputs to any number of them in turn."""
    return _element_wise(lambda *entries: reduce(function, entries))


def _numbers(function: Callable[[Any, Any], Any], hides: bool = False) -> Callable[[Any, Any], Any]:
    """Extend a function of two numbers to scores. hides: whether one -inf makes the result -inf."""

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
    """Divide two numbers. A quotient of integers is rounded towards zero."""
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
    """Return the larger of two numbers. A constant may be -inf."""
    for number, other in ((x, y), (y, x)):
        if isinstance(number, float) and number < HIDDEN:
            return other
    return _numbers(_larger)(x, y)


def _clip(context: Translation, node: Node, x: Tensor, *bounds: Tensor | None) -> Tensor:
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
    value = real(x).value
    if z3.is_div(value) and z3.is_to_real(value.arg(0)) and z3.is_rational_value(value.arg(1)):
        by = value.arg(1).as_fraction()
        if by.denominator == 1 and by > 0:  # a quotient of integers is easier for the solver
            return Score(z3.ToReal(value.arg(0).arg(0) / by.numerator))
    return Score(z3.ToReal(z3.ToInt(value)))


def _function(context: Translation, node: Node, *tensors: Tensor) -> Tensor:
    """Translate a function of real numbers without a definition."""

    def of(*entries: Any) -> Any:
        return context.undefined(node.operator, [real(entry).value for entry in entries])

    return broadcast(of, *tensors)


def _undefined(context: Translation, node: Node, shape: Sequence[Any]) -> Tensor:
    return Tensor(shape, lambda index: context.undefined(node.outputs[0], index))


def _weighted(context: Translation, node: Node, x: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
    """Translate a product with weights, with or without a bias, without a definition."""
    size = weights.shape[-2 if node.attributes.get("transB") else -1]
    return _undefined(context, node, [*x.shape[:-1], size])


def _like_first(context: Translation, node: Node, x: Tensor, *_: Any) -> Tensor:
    """Translate an operator that keeps the shape of its first input, without a definition."""
    return _undefined(context, node, x.shape)


def _over_axes(node: Node, x: Tensor, axes: Tensor | None) -> tuple[list[int], list[Any]]:
    """Return the axes that an operator reduces, and the shape of its result with keepdims=1."""
    rank = len(x.shape)
    over = [_axis(axis, rank) for axis in _known(axes, node.attributes.get("axes", range(rank)))]
    return over, [1 if axis in over else size for axis, size in enumerate(x.shape)]


def _mean(context: Translation, node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    """Translate a mean over axes, without a definition."""
    if not node.attributes.get("keepdims", 1):
        raise Untranslated(f"{node.operator} without its axis")
    return _undefined(context, node, _over_axes(node, x, axes)[1])


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def _unsqueeze(context: Translation, node: Node, x: Tensor, axes: Tensor) -> Tensor:
    rank = len(x.shape) + len(_known(axes))
    added, sizes = {_axis(axis, rank) for axis in _known(axes)}, iter(x.shape)
    return _with_sizes(context, x, [1 if axis in added else next(sizes) for axis in range(rank)])


def _squeeze(context: Translation, node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    ones = [axis for axis, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    gone = {_axis(axis, len(x.shape)) for axis in _known(axes, ones)}
    return _with_sizes(context, x, [n for axis, n in enumerate(x.shape) if axis not in gone])


def _product(sizes: Sequence[Any]) -> Any:
    return simplified(math.prod(sizes))


def _reshape(context: Translation, node: Node, x: Tensor, shape: Tensor) -> Tensor:
    sizes = whole(shape)
    if not node.attributes.get("allowzero"):
        sizes = [x.shape[k] if isinstance(n, int) and n == 0 else n for k, n in enumerate(sizes)]
    return _with_sizes(context, x, sizes)


def _flatten(context: Translation, node: Node, x: Tensor) -> Tensor:
    axis = _axis(node.attributes.get("axis", 1), len(x.shape))
    return _with_sizes(context, x, [_product(x.shape[:axis]), _product(x.shape[axis:])])


def _with_sizes(context: Translation, x: Tensor, sizes: Sequence[Any]) -> Tensor:
    if any(isinstance(n, int) and n == -1 for n in sizes):
        sizes = _with_rest(context, x.shape, sizes)
    x = x.source or x
    # Axes of size 1 are left out. Equal axes at both ends keep their indices.
    old = [k for k, n in enumerate(x.shape) if not (isinstance(n, int) and n == 1)]
    new = [k for k, n in enumerate(sizes) if not (isinstance(n, int) and n == 1)]
    before, after = [], []
    while old and new and alike(x.shape[old[0]], simplified(sizes[new[0]])):
        before.append((old.pop(0), new.pop(0)))
    while old and new and alike(x.shape[old[-1]], simplified(sizes[new[-1]])):
        after.append((old.pop(), new.pop()))

    def at(index: Index) -> Any:
        places: list[Any] = [0] * len(x.shape)
        for to, of in (*before, *after):
            places[to] = index[of]
        count: Any = 0
        for axis in new:
            count = count * sizes[axis] + index[axis]
        for axis in reversed(old[1:]):
            places[axis], count = count % x.shape[axis], divided(count, x.shape[axis])
        for axis in old[:1]:
            places[axis] = count
        return x.at(places)

    result = Tensor(sizes, at)
    result.source = x
    return result


def _with_rest(context: Translation, shape: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
    """Return sizes with a number in place of -1. Equal sizes are cancelled before the division."""
    left, result, by = list(shape), list(sizes), 1
    for place, size in enumerate(sizes):
        if isinstance(size, int):
            by *= abs(size)
            continue
        equal = (k for k, n in enumerate(left) if context.solver.equal(n, size))
        if (match := next(equal, None)) is None:
            others = [n for n in sizes if not isinstance(n, int) or n > 0]
            left, result, by = [_rest(context, shape, _product(others))], list(sizes), 1
            break
        result[place] = left.pop(match)
    known = math.prod(n for n in left if isinstance(n, int))
    if known % by:
        raise Untranslated("a shape with a size that is not known")
    rest = _product([*(n for n in left if not isinstance(n, int)), known // by])
    return [rest if isinstance(n, int) and n == -1 else n for n in result]


def _rest(context: Translation, shape: Sequence[Any], by: Any) -> Any:
    """Return the product of a shape over a size, if it is one size of the shape or two of them."""
    pairs = [x * y for k, x in enumerate(shape) for y in shape[k + 1 :]]
    for candidate in (*shape, *pairs):
        with suppress(Untranslated):  # if the solver does not decide, others are tried
            if context.solver.equal(_product(shape), candidate * by):
                return simplified(candidate)
    raise Untranslated("a shape with a size that is not known")


def _transpose(context: Translation, node: Node, x: Tensor) -> Tensor:
    order = node.attributes.get("perm", list(reversed(range(len(x.shape)))))

    def at(index: Index) -> Any:
        return x.at([index[order.index(axis)] for axis in range(len(order))])

    return Tensor([x.shape[axis] for axis in order], at)


def _expand(context: Translation, node: Node, x: Tensor, shape: Tensor) -> Tensor:
    return broadcast(lambda a, b: a, x, Tensor(whole(shape), lambda index: 0))


def _concat(context: Translation, node: Node, *parts: Tensor) -> Tensor:
    axis = _axis(node.attributes["axis"], len(parts[0].shape))
    return reduce(lambda x, y: _joined(x, y, axis), parts)


def _joined(x: Tensor, y: Tensor, axis: int) -> Tensor:
    border = x.shape[axis]

    def at(index: Index) -> Any:
        i = index[axis]
        behind = [*index[:axis], i - border, *index[axis + 1 :]]
        if isinstance(i, int) and isinstance(border, int):
            return x.at(index) if i < border else y.at(behind)
        return choose(i < border, x.at(index), y.at(behind))

    return Tensor([*x.shape[:axis], border + y.shape[axis], *x.shape[axis + 1 :]], at)


def _split(context: Translation, node: Node, x: Tensor, sizes: Tensor | None = None) -> Tensor:
    axis, count = _axis(node.attributes.get("axis", 0), len(x.shape)), len(node.outputs)
    given = node.attributes.get("split") if sizes is None else whole(sizes)
    if given is None and not isinstance(x.shape[axis], int):
        raise Untranslated("parts of an axis of a size that is not known")
    each = -(-x.shape[axis] // count) if given is None else 0
    given = given or [min(each, x.shape[axis] - each * part) for part in range(count)]
    first: Any = 0
    for name, size in zip(node.outputs, given, strict=True):
        shape = [*x.shape[:axis], size, *x.shape[axis + 1 :]]
        context.tensors[name] = _shifted(x, shape, {axis: first})
        first = first + size
    return context.tensors[node.outputs[0]]


def _shifted(x: Tensor, shape: Sequence[Any], first: Mapping[int, Any]) -> Tensor:
    """Return a part of a tensor. first: by axis, the index at which the part begins, if not 0."""
    return Tensor(shape, lambda index: x.at([i + first.get(n, 0) for n, i in enumerate(index)]))


def _trilu(context: Translation, node: Node, x: Tensor, k: Tensor | None = None) -> Tensor:
    shift, upper = _known(k, [0])[0], node.attributes.get("upper", 1)

    def at(index: Index) -> Any:
        behind = index[-1] - index[-2]
        return choose(behind >= shift if upper else behind <= shift, x.at(index), 0)

    return Tensor(x.shape, at)


def _tile(context: Translation, node: Node, x: Tensor, repeats: Tensor) -> Tensor:
    counts = whole(repeats)
    once = [isinstance(count, int) and count == 1 for count in counts]

    def at(index: Index) -> Any:
        triples = zip(index, x.shape, once, strict=True)
        return x.at([i if one else i % size for i, size, one in triples])

    return Tensor([size * count for size, count in zip(x.shape, counts, strict=True)], at)


def _slice(
    context: Translation,
    node: Node,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    first, last = whole(starts), whole(ends)
    places = _known(axes, range(len(first)))
    if any(step != 1 for step in _known(steps, [1] * len(first))):
        raise Untranslated("a slice with steps")
    shape, offsets = list(x.shape), dict[int, Any]()
    for begin, end, place in zip(first, last, places, strict=True):
        axis = _axis(place, len(shape))
        begin, end = (_bounded(at, x.shape[axis]) for at in (begin, end))
        shape[axis], offsets[axis] = _larger(end - begin, 0), begin
    return _shifted(x, shape, offsets)


def _bounded(place: Any, size: Any) -> Any:
    """Clip a start or an end of a slice to an axis. Below 0, it counts from the end of the axis."""
    if isinstance(place, int) and place >= 1 << 31:
        return size
    if isinstance(place, int) and place == 0:
        return 0
    return simplified(_smaller(_larger(_wrapped(place, size), 0), size))


def _wrapped(place: Any, size: Any) -> Any:
    """Return an index of an axis. Below 0, it counts from the end."""
    return choose(place < 0, place + size, place)


def _gather(context: Translation, node: Node, x: Tensor, at: Tensor) -> Tensor:
    axis, rank = _axis(node.attributes.get("axis", 0), len(x.shape)), len(at.shape)

    def entry(index: Index) -> Any:
        size, place = x.shape[axis], 0
        if not (isinstance(size, int) and size == 1):  # of one row, only index 0 is valid
            place = _wrapped(whole_number(at.at(index[axis : axis + rank])), size)
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
    value: Tensor | None = None,
    axes: Tensor | None = None,
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
    if not (by > 0 if isinstance(by, int) else context.solver.excludes(by <= 0)):
        raise Untranslated("a range whose steps may be below 1")

    def entry(index: Index) -> Any:
        value = first + index[0] * by
        return real(value) if floats else value

    return Tensor([_larger(divided(last - first + by - 1, by), 0)], entry)


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
    """Translate TensorScatter: x with new entries from an index of each row on."""
    axis = _axis(node.attributes.get("axis", -2), len(x.shape))
    if node.attributes.get("mode", "linear") != "linear":
        raise Untranslated("a circular cache")

    def at(index: Index) -> Any:
        place = index[axis] - first.at(index[:1])
        inside = both(place >= 0, place < new.shape[axis])
        return choose(inside, new.at([*index[:axis], place, *index[axis + 1 :]]), x.at(index))

    return Tensor(x.shape, at)


def _sum(context: Translation, node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    """Translate CumSum, ReduceSum, ReduceMax or ReduceMin, if its result for x is in `sums`."""
    cumulative, (over, ones) = node.operator == "CumSum", _over_axes(node, x, axes)
    if cumulative and (node.attributes.get("exclusive") or node.attributes.get("reverse")):
        raise Untranslated("a sum in another order")
    entries, one = broadcast(whole_number, x), not cumulative and node.attributes.get("keepdims", 1)
    left = [size for axis, size in enumerate(x.shape) if axis not in over]
    shape = x.shape if cumulative else ones if one else left

    def unknown(index: Index) -> Any:
        raise Untranslated(f"{node.operator} of values without a known sum")

    with suppress(Untranslated):  # entries of x may be unknown sums themselves
        zeros = Tensor(x.shape, lambda index: 0)
        if node.operator in ("CumSum", "ReduceSum") and context.solver.same(entries, zeros):
            return Tensor(shape, lambda index: 0)
        for operator, summed, result in context.sums:
            fits = operator == node.operator and len(summed.shape) == len(x.shape)
            if fits and over == [len(x.shape) - 1] and context.solver.same(entries, summed):
                return _with_sizes(context, result, [*result.shape, 1]) if one else result
    return Tensor(shape, unknown)


# Operators without a definition: functions of single numbers, and others of many.
FUNCTIONS = ["Sin", "Cos", "Exp", "Log", "Sqrt", "Pow", "Ceil", "Sigmoid", "Tanh"]
FUNCTIONS += ["Softplus", "Reciprocal"]
OF_MANY = ["Softmax", "Gelu", "Silu", "Swish", "HardSwish", "LeakyRelu", "Erf", "RotaryEmbedding"]
OF_MANY += ["LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"]
UNDEFINED: dict[str, Operator] = {
    **dict.fromkeys(FUNCTIONS, _function),
    **dict.fromkeys(OF_MANY, _like_first),
    "MatMul": _weighted,
    "Gemm": _weighted,
    "ReduceMean": _mean,
}
OPERATORS: dict[str, Operator] = {
    **UNDEFINED,
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
    "Flatten": _flatten,
    "Split": _split,
    "Trilu": _trilu,
    "Tile": _tile,
    "IsNaN": _element_wise(lambda x: isinstance(x, float) and math.isnan(x)),
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
    "ReduceMin": _sum,
}
