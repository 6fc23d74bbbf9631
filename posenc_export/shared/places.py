"""Rules of positions as text: which keys a query sees, and which row of a table a token or a pair
of a query and a key reads.

A rule is an expression of Python with whole numbers, names of positions, `+ - * // %`, comparisons,
`and`, `or`, `not`, `x if c else y`, `min`, `max`, `abs` and `count(x, a, b, ...)`, which is how
many of a, b, ... are at most x. An encoding and a visibility declare
theirs beside their formula, the manifest of an artefact states them, and `evaluate` computes them
with numbers, arrays or other values, such as those of a solver.
"""

import ast
from functools import lru_cache, reduce
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np

from posenc_export.shared.refusal import refusal

LONGEST = 4096  # characters of a rule
DEEPEST = 48  # operations of which one takes the result of another


class Operations(NamedTuple):
    """What operators that Python does not overload compute."""

    both: Callable[[Any, Any], Any]
    either: Callable[[Any, Any], Any]
    negated: Callable[[Any], Any]
    choose: Callable[[Any, Any, Any], Any]  # a condition, and the values if it holds and if not
    divide: Callable[[Any, int], Any]  # rounded down, by a number above 0
    modulo: Callable[[Any, int], Any]


NUMBERS = Operations(
    np.logical_and, np.logical_or, np.logical_not, np.where, np.floor_divide, np.mod
)
ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
    ast.Eq: lambda x, y: x == y,
    ast.NotEq: lambda x, y: x != y,
    ast.Lt: lambda x, y: x < y,
    ast.LtE: lambda x, y: x <= y,
    ast.Gt: lambda x, y: x > y,
    ast.GtE: lambda x, y: x >= y,
}


def seen(before: int, after: int, chunk: int) -> str:
    """Return the rule of the keys at k that a query at q sees; limits as in ops.attention_mask."""
    limits = ["k <= q" if after == 0 else f"k - q < {after + 1}"] if after >= 0 else []
    limits += [f"q - k < {before + 1}"] if before >= 0 else []
    limits += [f"k // {chunk} == q // {chunk}"] if chunk else []
    return " and ".join(limits) or "k >= 0"


def evaluate(rule: str, values: Mapping[str, Any], by: Operations = NUMBERS) -> Any:
    """Return the value of a rule, or raise ValueError if it is none or has other names.

    Args:
        rule: as in the module's docstring.
        values: by name, such as q and k for the positions of a query and a key.
        by: operations on these values; of numbers and arrays of numpy by default.
    """
    return _value(_parsed(rule), rule, values, by, 0)


@lru_cache(1024)
def _parsed(rule: str) -> ast.expr:
    if len(rule) > LONGEST:
        raise _refused(rule)
    try:
        return ast.parse(rule, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refused(rule) from None


def _refused(rule: str) -> ValueError:
    return refusal("places", "a rule of whole numbers, positions and their operators", rule[:64])


def _value(node: ast.expr, rule: str, values: Mapping[str, Any], by: Operations, depth: int) -> Any:
    """Return the value of a part of a rule."""

    def of(part: ast.expr) -> Any:
        return _value(part, rule, values, by, depth + 1)

    if depth > DEEPEST:
        raise _refused(rule)
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=x):
            return 0 - of(x)
        case ast.UnaryOp(op=ast.Not(), operand=x):
            return by.negated(of(x))
        case ast.BinOp(
            left=x, op=ast.FloorDiv() | ast.Mod() as op, right=ast.Constant(value=int(y))
        ):
            if y > 0:
                return (by.divide if isinstance(op, ast.FloorDiv) else by.modulo)(of(x), y)
        case ast.BinOp(left=x, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            return ARITHMETIC[type(op)](of(x), of(right))
        case ast.BoolOp(op=op, values=parts):
            join = by.both if isinstance(op, ast.And) else by.either
            return reduce(join, map(of, parts))
        case ast.Compare(left=x, ops=ops, comparators=others) if {*map(type, ops)} <= {*ARITHMETIC}:
            sides = [of(x), *map(of, others)]
            pairs = zip(ops, sides, sides[1:], strict=False)
            return reduce(by.both, (ARITHMETIC[type(op)](a, b) for op, a, b in pairs))
        case ast.IfExp(test=condition, body=x, orelse=y):
            return by.choose(of(condition), of(x), of(y))
        case ast.Call(func=ast.Name(id="abs"), args=[x], keywords=[]):
            value = of(x)
            return by.choose(value < 0, 0 - value, value)
        case ast.Call(func=ast.Name(id="count"), args=[x, *limits], keywords=[]):
            value = of(x)
            return sum((by.choose(value >= of(limit), 1, 0) for limit in limits), 0)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[x, *rest], keywords=[]):
            first, least = of(x), name == "min"
            for other in map(of, rest):
                keep = first <= other if least else first >= other
                first = by.choose(keep, first, other)
            return first
    raise _refused(rule)
