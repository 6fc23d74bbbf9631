"""Operators of torch as nodes of ONNX, and the graph that these nodes make.

Sizes are tensors of shape [1].
"""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import numpy as np

from posenc_export.runtime.graphs import onnx_parts
from posenc_export.runtime.graphs.onnx_nodes import TYPES, Nodes

OPSET = 24  # has TensorScatter
LAST = (1 << 63) - 1  # the end of a slice without an end
CODES = {name: code for code, name in TYPES.items()}  # TensorProto.DataType
# Names that ONNX has for operators on computed numbers, which are no part of what is proved
NAMES = {"matmul": "MatMul", "softmax": "Softmax", "scaled_dot_product_attention": "Attention"}
Arguments = Mapping[str, Any]  # of an operator, by name in its schema


class Written:
    """A graph to which nodes are added. Their operands are names, numbers, lists and arrays of
    numbers, and nodes of a torch.export program.

    Attributes:
        graph: the nodes; of tensors that the program stores, names and shapes.
        names: of the results of nodes of the program.
        place: begins the names of results.
    """

    def __init__(self) -> None:
        self.graph, self.names, self.place = Nodes(opsets={"": OPSET}), dict[Any, str](), ""
        self._known: Dict[str, List[str]] = {}  # outputs of nodes that compute the same

    def name(self, x: Any) -> str:
        """Return the name of an operand; empty for None."""
        if isinstance(x, str) or x is None:
            return x or ""
        if is_node(x):
            return self.names[x]
        kind = np.float32 if isinstance(x, float) else None if isinstance(x, bool) else np.int64
        numbers = x if isinstance(x, np.ndarray) else np.array(x, kind)
        name = f"{numbers.tolist()} {numbers.dtype}"
        self.graph.constants[name] = onnx_parts.constant(name, numbers)
        return name

    def sizes(self, numbers: Sequence[Any]) -> str:
        """Return the name of whole numbers as a tensor of one axis."""
        if all(isinstance(n, int) for n in numbers):
            return self.name(list(numbers))
        parts = [self.name([n] if isinstance(n, int) else n) for n in numbers]
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, axis=0)

    def size(self, x: Any, axis: int) -> str:
        """Return the name of a size of a tensor."""
        return self.node("Shape", x, start=axis, end=axis + 1)

    def node(self, operator: str, *operands: Any, **attributes: Any) -> str:
        """Add a node with one output, and return its name."""
        return self.nodes(operator, 1, *operands, **attributes)[0]

    def nodes(self, operator: str, outputs: int, *operands: Any, **attributes: Any) -> List[str]:
        """Add a node, and return the names of its outputs."""
        read = [self.name(x) for x in operands]
        while read and not read[-1]:
            read.pop()
        key = repr((operator, read, attributes))
        if key not in self._known:
            number = len(self.graph.nodes)
            made = [f"{self.place} {operator} {number}.{n}" for n in range(outputs)]
            self.graph.nodes.append(onnx_parts.new_node(operator, read, made, attributes))
            self._known[key] = made
        return self._known[key]

    def cast(self, x: Any, dtype: Any) -> str:
        """Return the name of an operand in a dtype."""
        if not is_node(x):
            return self.name(np.array(x, str(dtype).rpartition(".")[2]))
        of, to = "int64" if is_size(x) else element(value(x).dtype), element(dtype)
        return self.name(x) if of == to else self.node("Cast", x, to=CODES[to])


def is_node(x: Any) -> bool:
    """Return whether an operand is a node of a program."""
    return hasattr(x, "meta")


def value(x: Any) -> Any:
    """Return an operand, or what a program says of the result of a node: a tensor without numbers,
    or a size.
    """
    return x.meta["val"] if is_node(x) else x


def is_size(x: Any) -> bool:
    """Return whether an operand is a size or truth value that a node computes."""
    return is_node(x) and not hasattr(value(x), "dim")


def rank(x: Any) -> int:
    """Return the number of axes of a tensor."""
    return int(value(x).dim())


def element(dtype: Any) -> str:
    """Return the element type of a dtype of torch as ONNX has it."""
    name = str(dtype).rpartition(".")[2]
    return onnx_parts.ELEMENTS.get(name, name)


# Returns the names of the results of an operator, of which `value` is given; None for an operator
# that these arguments make another.
Writer = Callable[[Written, Arguments, Any], Any]


def _direct(text: str) -> Writer:
    """Return a writer of one node: an operator of ONNX and names of arguments, with ~ in the type
    of the result, and with = in the type that both have in common.
    """
    operator, *names = text.split()

    def write(w: Written, a: Arguments, y: Any) -> Optional[str]:
        import torch

        of_bits = operator in ("And", "Or") and element(y.dtype) != "bool"
        if a.get("alpha", 1) != 1 or of_bits:
            return None
        common = torch.result_type(value(a["self"]), value(a["other"])) if "=" in text else y.dtype
        read = [(name.lstrip("~="), name[0] in "~=") for name in names]
        return w.node(operator, *(w.cast(a[n], common) if cast else a[n] for n, cast in read))

    return write


def _divided(w: Written, a: Arguments, y: Any) -> Optional[str]:
    mode, x, other = a.get("rounding_mode"), a["self"], a["other"]
    if mode is None or y.is_floating_point():
        quotient = w.node("Div", w.cast(x, y.dtype), w.cast(other, y.dtype))
        return {None: quotient, "floor": w.node("Floor", quotient)}.get(mode)
    x, other = w.cast(x, y.dtype), w.cast(other, y.dtype)
    if mode == "floor":  # Div of whole numbers rounds towards zero
        x = w.node("Sub", x, w.node("Mod", x, other))
    return w.node("Div", x, other)


def _clamped(w: Written, a: Arguments, y: Any) -> str:
    low, high = (None if a.get(n) is None else w.cast(a[n], y.dtype) for n in ("min", "max"))
    return w.node("Clip", w.cast(a["self"], y.dtype), low, high)


def _filled(w: Written, shape: Any, number: Any, y: Any) -> str:
    return w.node("Expand", w.cast(number, y.dtype), shape)


def _range(w: Written, a: Arguments, y: Any) -> Optional[str]:
    if a.get("step", 1) != 1 or element(y.dtype) != "int64":
        return None
    ends = [a.get("start", 0), a["end"]]
    scalars = [w.node("Squeeze", x) if is_size(x) else np.array(x) for x in ends]
    return w.node("Range", *scalars, np.array(1))


def _summed(w: Written, a: Arguments, y: Any) -> str:
    axes = list(range(rank(a["self"])) if a.get("dim") is None else a["dim"])
    read = w.cast(a["self"], y.dtype)
    return w.node("ReduceSum", read, axes, keepdims=int(a.get("keepdim", False)))


def _extremum(operator: str) -> Writer:
    def write(w: Written, a: Arguments, y: Any) -> str:
        axes = list(a.get("dim") or range(rank(a["self"])))
        return w.node(operator, a["self"], axes, keepdims=int(a.get("keepdim", False)))

    return write


def _regrouped(first: str, last: str) -> Writer:
    """Return a writer of an operator that gives some axes other sizes. The names are of
    arguments: the first and the last of these axes.
    """

    def write(w: Written, a: Arguments, y: Any) -> str:
        x, count = a["self"], rank(a["self"])
        before, after = range(a.get(first, 0) % count), range(a.get(last, -1) % count + 1, count)
        kept = ([w.size(x, axis) for axis in axes] for axes in (before, after))
        return w.node("Reshape", x, w.sizes([*next(kept), *a.get("sizes", [-1]), *next(kept)]))

    return write


def _expanded(w: Written, a: Arguments, y: Any) -> str:
    sizes = [1 if n == -1 else n for n in a["size"]]
    return w.node("Expand", a["self"], w.sizes(sizes))


def _transposed(w: Written, a: Arguments, y: Any) -> str:
    count = rank(a["self"])
    order, first, second = [*range(count)], a.get("dim0", 0) % count, a.get("dim1", 1) % count
    order[first], order[second] = second, first
    return w.node("Transpose", a["self"], perm=[k % count for k in a.get("dims", order)])


def _sliced(w: Written, a: Arguments, y: Any) -> Optional[str]:
    if a.get("step", 1) != 1:
        return None
    start, end = a.get("start"), a.get("end")
    start, end = 0 if start is None else start, LAST if end is None else end
    if (start, end) == (0, LAST):
        return w.name(a["self"])
    return w.node("Slice", a["self"], w.sizes([start]), w.sizes([end]), [a.get("dim", 0)])


def _selected(w: Written, a: Arguments, y: Any) -> str:
    index, axis = a["index"], a["dim"] % rank(a["self"])
    at = w.node("Squeeze", index) if is_size(index) else np.array(index)
    return w.node("Gather", a["self"], at, axis=axis)


def _split(w: Written, a: Arguments, y: Any) -> Optional[List[str]]:
    parts = a.get("split_sizes", a.get("split_size"))
    known = isinstance(parts, list) and not any(map(is_node, parts))
    return w.nodes("Split", len(y), a["self"], parts, axis=a.get("dim", 0)) if known else None


def _joined(w: Written, a: Arguments, y: Any) -> str:
    return w.node("Concat", *(w.cast(x, y.dtype) for x in a["tensors"]), axis=a.get("dim", 0))


def _padded(w: Written, a: Arguments, y: Any) -> Optional[str]:
    if a.get("mode", "constant") != "constant":
        return None
    pairs = [a["pad"][n : n + 2] for n in range(0, len(a["pad"]), 2)]
    axes = [-1 - n for n in range(len(pairs))]
    pads = [*(before for before, _ in pairs), *(after for _, after in pairs)]
    fill = np.array(a.get("value") or 0, np.float32 if y.is_floating_point() else np.int64)
    return w.node("Pad", a["self"], w.sizes(pads), fill, axes)


# Operators of ONNX by the names that torch and, of whole numbers, the module operator have
COMPARED = {"ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual", "lt": "Less"}
COMPARED["eq"] = "Equal"
ARITHMETIC = {"add": "Add", "sub": "Sub", "mul": "Mul"}
NUMBERS = {**ARITHMETIC, **COMPARED}
UNARY = "abs neg floor exp log sin cos relu sigmoid tanh sqrt gelu silu"
ARITHMETIC |= {"remainder": "Mod", "maximum": "Max", "minimum": "Min"}
OPERATORS: Dict[str, Writer] = {
    **{n: _direct(f"{operator} =self =other") for n, operator in COMPARED.items()},
    **{n: _direct(f"{operator} ~self ~other") for n, operator in ARITHMETIC.items()},
    **{n: _direct(f"{n.capitalize()} ~self") for n in UNARY.split()},
    **{n: _direct("And self other") for n in ("__and__", "logical_and")},
    **{n: _direct("Or self other") for n in ("__or__", "logical_or")},
    "rsub": _direct("Sub ~other ~self"),
    "logical_not": _direct("Not self"),
    "to": lambda w, a, y: w.cast(a["self"], y.dtype),
    "clone": _direct("Identity self"),
    "where": _direct("Where condition ~self ~other"),
    "masked_fill": _direct("Where mask ~value ~self"),
    "embedding": _direct("Gather weight indices"),
    "div": _divided,
    "clamp": _clamped,
    "log1p": lambda w, a, y: w.node("Log", w.node("Add", a["self"], w.cast(1.0, y.dtype))),
    "linear": lambda w, a, y: w.node("Gemm", a["input"], a["weight"], a.get("bias"), transB=1),
    "zeros": lambda w, a, y: _filled(w, w.sizes(a["size"]), 0, y),
    "zeros_like": lambda w, a, y: _filled(w, w.node("Shape", a["self"]), 0, y),
    "full_like": lambda w, a, y: _filled(w, w.node("Shape", a["self"]), a["fill_value"], y),
    "arange": _range,
    "cumsum": lambda w, a, y: w.node("CumSum", w.cast(a["self"], y.dtype), np.array(a["dim"])),
    "sum": _summed,
    "amax": _extremum("ReduceMax"),
    "amin": _extremum("ReduceMin"),
    "unsqueeze": lambda w, a, y: w.node("Unsqueeze", a["self"], [a["dim"]]),
    "squeeze": lambda w, a, y: w.node("Squeeze", a["self"], [a["dim"]]),
    "view": lambda w, a, y: w.node("Reshape", a["self"], w.sizes(a["size"])),
    "flatten": _regrouped("start_dim", "end_dim"),
    "unflatten": _regrouped("dim", "dim"),
    "expand": _expanded,
    "transpose": _transposed,
    "t": _transposed,
    "permute": _transposed,
    "slice": _sliced,
    "select": _selected,
    "split": _split,
    "split_with_sizes": _split,
    "cat": _joined,
    "pad": _padded,
    "index_select": lambda w, a, y: w.node("Gather", a["self"], a["index"], axis=a["dim"]),
    "gather": lambda w, a, y: w.node("GatherElements", a["self"], a["index"], axis=a["dim"]),
}
