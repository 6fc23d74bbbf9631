"""Operators of torch as nodes of ONNX, for the part of a graph that positions and sizes determine.

Sizes are tensors of shape [1].
"""

from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np

from posenc_export.runtime.graphs import onnx_parts
from posenc_export.runtime.graphs.onnx_nodes import TYPES, Constant, Nodes
from posenc_export.runtime.verification.integer_graph import TOKENS, IntegerPart, integer_part
from posenc_export.runtime.verification.solver import Untranslated

OPSET = 24  # has TensorScatter
LAST = (1 << 63) - 1  # the end of a slice without an end
CODES = {name: code for code, name in TYPES.items()}  # TensorProto.DataType
# Names that ONNX has for operators on computed numbers, which are no part of what is proved
NAMES = {"embedding": "Gather", "gather": "GatherElements", "linear": "Gemm", "matmul": "MatMul"}
NAMES |= {"scaled_dot_product_attention": "Attention", "softmax": "Softmax"}
MEMORY = "memory"  # stands for what an operator writes to
VALUE = "Value"  # stands for an operator that makes a number of the entries of a tensor
Arguments = Mapping[str, Any]


class Number(int):
    """A whole number or truth value that may differ from call to call."""

    made: Tuple[Any, ...]  # an operator with its operands; ("Shape", tensor, axis) for a size


class Unknown(float):
    """A floating-point number that may differ from call to call."""


def number(value: Any, *made: Any) -> Any:
    """Return what an operator gives for a call, and how."""
    if isinstance(value, float):
        return Unknown(value)
    result = Number(value)
    result.made = made
    return result


class Record:
    """The nodes of a call.

    Args:
        inputs: of the graph, by name.

    Attributes:
        graph: the nodes; constants have names and shapes, but no content.
        stored: the constants by name.
        assumed: branches that sizes of computed numbers choose, as in this call.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.graph = Nodes(opsets={"": OPSET})
        self.stored: Dict[str, Any] = {}
        self.assumed = 0
        self._names: Dict[int, str] = {}  # by id of a tensor, which is kept
        self._constants: Dict[int, str] = {}  # the same, of tensors that no call changes
        self._kept: List[Any] = []
        self._known: Dict[str, List[str]] = {}  # outputs of nodes that compute the same
        self._whole: Set[str] = set()  # values that positions and sizes determine
        self._muted = False  # whether nothing is written down
        self._place, self._count = "", 0  # of the operator that is written down, and of its nodes
        self._inputs = set(inputs)
        for name, tensor in inputs.items():
            self._call(tensor, name)
            self.graph.inputs[name] = element(tensor.dtype)
            if not tensor.is_floating_point() and name not in TOKENS:
                self._whole.add(name)
        tokens = next(iter(inputs.values()))  # [B,S] or [B,S,E]
        self._call_sizes = [number(tokens.shape[axis], "Shape", tokens, axis) for axis in (0, 1)]

    def _call(self, tensor: Any, name: str) -> None:
        self._names[id(tensor)] = name
        self._kept.append(tensor)

    def varies(self, x: Any) -> bool:
        """Return whether a value may differ from call to call."""
        if isinstance(x, (list, tuple)):
            return any(map(self.varies, x))
        return isinstance(x, (Number, Unknown)) or id(x) in self._names

    def whole(self, x: Any) -> bool:
        """Return whether positions and sizes determine a value."""
        if isinstance(x, (list, tuple)):
            return all(map(self.whole, x))
        if isinstance(x, Number):
            operator, *operands = x.made
            if operator == "Shape" and self.name(operands[0]) in self._inputs:
                return True
            return operator != VALUE and all(map(self.whole, operands))
        if id(x) in self._names:
            return self._names[id(x)] in self._whole
        return not isinstance(x, Unknown)

    def name(self, x: Any) -> str:
        """Return the name of a tensor, a number or a constant; empty for none."""
        if isinstance(x, str) or x is None:
            return x or ""
        if isinstance(x, Number):
            return self._number(x)
        if id(x) in self._names:
            return self._names[id(x)]
        name = f"constant {len(self.graph.constants)}"
        if isinstance(x, (bool, int, float, list, np.ndarray)):
            numbers = _array(x)
            name = f"{numbers.tolist()} {numbers.dtype}"
            self.graph.constants[name] = onnx_parts.constant(name, numbers)
        elif id(x) in self._constants:
            return self._constants[id(x)]
        else:
            self._constants[id(x)] = name
            self._kept.append(x)
            self.graph.constants[name] = Constant(name, element(x.dtype), tuple(x.shape))
            self.stored[name] = x
        return name

    def _number(self, x: Number) -> str:
        operator, *operands = x.made
        if operator != "Shape":
            return self.node(operator, *map(self.name, operands))
        return self.node("Shape", operands[0], start=operands[1], end=operands[1] + 1)

    def sizes(self, numbers: Sequence[Any]) -> str:
        """Return the name of whole numbers as a tensor of one axis."""
        if not self.varies(numbers):
            return self.name([int(n) for n in numbers])
        parts = [self.name(n if isinstance(n, Number) else [int(n)]) for n in numbers]
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, axis=0)

    def node(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        """Add a node with one output, and return its name."""
        (output,) = self.nodes(operator, 1, *inputs, **attributes)
        return output

    def nodes(self, operator: str, outputs: int, *inputs: Any, **attributes: Any) -> List[str]:
        """Add a node, and return the names of its outputs."""
        read = [self.name(x) for x in inputs]
        while read and not read[-1]:
            read.pop()
        key = repr((operator, read, attributes))
        if key in self._known and MEMORY not in read:
            return self._known[key]
        self._count += 1
        made = [f"{self._place} {operator} {self._count}.{n}" for n in range(outputs)]
        self.graph.nodes.append(onnx_parts.new_node(operator, read, made, attributes))
        self._known[key] = made
        return made

    def cast(self, x: Any, dtype: Any) -> str:
        """Return the name of a value in a dtype."""
        if not self.varies(x) and isinstance(x, (bool, int, float)):
            return self.name(np.array(x, str(dtype).rpartition(".")[2]))
        of, to = "int64" if isinstance(x, Number) else element(x.dtype), element(dtype)
        return self.name(x) if of == to else self.node("Cast", x, to=CODES[to])

    def branches(self, condition: Any) -> List[int]:
        """Return which of two branches calls take: first that of this one, which they are claimed
        to take, too, if sizes choose it.
        """
        taken = int(not condition)
        if not isinstance(condition, Number):
            return [taken]
        if self.whole(condition) and not self._muted:
            name = self.name(condition)
            self.nodes("branch", 1, MEMORY, self.node("Not", name) if taken else name)
        elif any(x.made[0] == VALUE for x in _operands(condition)):
            return [taken, 1 - taken]
        else:
            self.assumed += 1
        return [taken]

    def at(self, place: str) -> None:
        """Begin to write an operator down that has a name."""
        self._place, self._count = place, 0

    def apply(self, operator: Any, arguments: Arguments, result: Any) -> Any:
        """Write an operator down that gave a result for a call, and return that result.

        arguments: by name in the schema of the operator.
        """
        given, schema = list(arguments.values()), operator._schema
        name = schema.name.partition("::")[2]
        if schema.is_mutable and (self._muted or name not in WRITES):
            raise Untranslated(f"operator {name}, which writes")
        if self._muted or name == "dim" or not any(map(self.varies, given)):
            return result
        if name in ("size", "sym_size"):
            dim = arguments["dim"] % arguments["self"].dim()
            return number(result, "Shape", arguments["self"], dim)
        if isinstance(result, (bool, int, float)):
            return number(result, VALUE)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        write = OPERATORS.get(name) if all(map(self.whole, given)) else None
        if name in WRITES:
            made = self._written(name, arguments)
        elif name == "expand" and write is None:  # entries that do not depend on a new size
            made = [self.name(arguments["self"])]
        elif write is not None and (written := write(self, arguments, result)) is not None:
            made = written if isinstance(written, list) else [written]
            self._whole.update(made)
        else:
            kept = {"transB": 1} if name == "linear" else {}
            made = self.nodes(NAMES.get(name, name), len(results), *tensors_in(given), **kept)
        for tensor, output in zip(results, made, strict=True):
            self._call(tensor, output)
        return result

    def _written(self, name: str, a: Arguments) -> List[str]:
        """Write new slots of a cache down."""
        memory, new = a["self"], a["values" if name == "index_put_" else "source"]
        here = memory.untyped_storage().data_ptr()
        known = (x for x in self._kept if x is not memory and self.whole(x))
        if a.get("accumulate") or any(x.untyped_storage().data_ptr() == here for x in known):
            raise Untranslated("a cache that is read under two names")
        if name == "index_put_":
            rows, columns = (self.name(index) for index in a["indices"])
            first = self.node("Gather", columns, np.array(0), axis=1)
        else:
            columns = self.node("Unsqueeze", a["index"], [0])
            rows, first = "", self.node("Slice", a["index"], [0], [1])
        columns = self.node("Expand", columns, self.sizes(self._call_sizes))
        self.nodes(name, 1, MEMORY, rows, columns)
        if not self.whole(memory):
            return [self.node("Memory", MEMORY, memory)]
        made = self.node("TensorScatter", memory, new, first, axis=1)
        self._whole.add(made)
        return [made]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Write nothing down within it."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def opaque(self, operator: str, read: Sequence[Any], result: Any) -> Any:
        """Write one of the results of an operator down, of which only its tensors are known."""
        for tensor in tensors_in([result]):
            self._call(tensor, self.node(operator, MEMORY, *tensors_in(read)))
        return result

    def part(self) -> IntegerPart:
        """Return the part that positions and sizes determine, with its constants."""
        part = integer_part(self.graph)
        read = {name for node in part.nodes for name in node.inputs}
        for name in read & self.stored.keys():
            numbers = self.stored[name].detach()
            numbers = numbers.float() if element(numbers.dtype) == "bfloat16" else numbers
            part.graph.constants[name] = onnx_parts.constant(name, numbers.contiguous().numpy())
        return part

    def output(self, name: str, tensor: Any) -> None:
        """Give a tensor the name of an output."""
        self.graph.nodes.append(onnx_parts.new_node("Identity", [self.name(tensor)], [name]))
        self.graph.outputs.append(name)


def _operands(x: Number) -> Iterator[Number]:
    yield x
    for operand in x.made[1:]:
        yield from _operands(operand) if isinstance(operand, Number) else ()


def tensors_in(values: Sequence[Any]) -> List[Any]:
    """Return the tensors among values and lists of them."""
    flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
    return [x for x in flat if hasattr(x, "dim")]


def element(dtype: Any) -> str:
    """Return the element type of a dtype of torch as ONNX has it."""
    name = str(dtype).rpartition(".")[2]
    return onnx_parts.ELEMENTS.get(name, name)


def _array(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    kind = np.float32 if isinstance(x, float) else None if isinstance(x, bool) else np.int64
    return np.array(x, kind)


Writer = Callable[[Record, Arguments, Any], Any]
WRITES = ("index_put_", "index_copy_")


def _direct(text: str) -> Writer:
    """Return a writer of one node: an operator of ONNX and names of arguments, with ~ in the type
    of the result, and with = in the type that both have in common.
    """
    operator, *names = text.split()

    def write(r: Record, a: Arguments, y: Any) -> Optional[str]:
        import torch

        of_bits = operator in ("And", "Or") and element(y.dtype) != "bool"
        if a.get("alpha", 1) != 1 or of_bits:
            return None
        dtype = torch.result_type(a["self"], a["other"]) if "=" in text else y.dtype
        read = [(name.lstrip("~="), name[0] in "~=") for name in names]
        values = [r.cast(a[name], dtype) if as_result else a[name] for name, as_result in read]
        return r.node(operator, *values)

    return write


def _divided(r: Record, a: Arguments, y: Any) -> Optional[str]:
    mode, x, other = a.get("rounding_mode"), a["self"], a["other"]
    if mode is None or y.is_floating_point():
        quotient = r.node("Div", r.cast(x, y.dtype), r.cast(other, y.dtype))
        return {None: quotient, "floor": r.node("Floor", quotient)}.get(mode)
    x, other = r.cast(x, y.dtype), r.cast(other, y.dtype)
    if mode == "floor":  # Div of whole numbers rounds towards zero
        x = r.node("Sub", x, r.node("Mod", x, other))
    return r.node("Div", x, other)


def _clamped(r: Record, a: Arguments, y: Any) -> str:
    low, high = (None if a.get(n) is None else r.cast(a[n], y.dtype) for n in ("min", "max"))
    return r.node("Clip", r.cast(a["self"], y.dtype), low, high)


def _filled(r: Record, shape: Any, value: Any, y: Any) -> str:
    return r.node("Expand", r.cast(value, y.dtype), shape)


def _range(r: Record, a: Arguments, y: Any) -> Optional[str]:
    if a.get("step", 1) != 1 or element(y.dtype) != "int64":
        return None
    ends = [a.get("start", 0), a["end"]]
    scalars = [r.node("Squeeze", x) if isinstance(x, Number) else np.array(x) for x in ends]
    return r.node("Range", *scalars, np.array(1))


def _summed(r: Record, a: Arguments, y: Any) -> str:
    axes = list(range(a["self"].dim())) if a.get("dim") is None else list(a["dim"])
    read = r.cast(a["self"], y.dtype)
    return r.node("ReduceSum", read, axes, keepdims=int(a.get("keepdim", False)))


def _extremum(operator: str) -> Writer:
    def write(r: Record, a: Arguments, y: Any) -> str:
        axes = list(a.get("dim") or range(a["self"].dim()))
        return r.node(operator, a["self"], axes, keepdims=int(a.get("keepdim", False)))

    return write


def _regrouped(first: str, last: str) -> Writer:
    """Return a writer of an operator that gives some axes other sizes. The names are of
    arguments: the first and the last of these axes.
    """

    def write(r: Record, a: Arguments, y: Any) -> str:
        x, rank = a["self"], a["self"].dim()
        before, after = range(a.get(first, 0) % rank), range(a.get(last, -1) % rank + 1, rank)
        kept = ([number(x.shape[k], "Shape", x, k) for k in axes] for axes in (before, after))
        return r.node("Reshape", x, r.sizes([*next(kept), *a.get("sizes", [-1]), *next(kept)]))

    return write


def _expanded(r: Record, a: Arguments, y: Any) -> str:
    sizes = [1 if not isinstance(n, Number) and n == -1 else n for n in a["size"]]
    return r.node("Expand", a["self"], r.sizes(sizes))


def _transposed(r: Record, a: Arguments, y: Any) -> str:
    order, rank = [*range(a["self"].dim())], a["self"].dim()
    first, second = a.get("dim0", 0) % rank, a.get("dim1", 1) % rank
    order[first], order[second] = second, first
    return r.node("Transpose", a["self"], perm=[k % rank for k in a.get("dims", order)])


def _sliced(r: Record, a: Arguments, y: Any) -> Optional[str]:
    if a.get("step", 1) != 1:
        return None
    start, end = a.get("start"), a.get("end")
    start, end = 0 if start is None else start, LAST if end is None else end
    if not r.varies([start, end]) and (start, end) == (0, LAST):
        return r.name(a["self"])
    return r.node("Slice", a["self"], r.sizes([start]), r.sizes([end]), [a.get("dim", 0)])


def _selected(r: Record, a: Arguments, y: Any) -> str:
    index, axis = a["index"], a["dim"] % a["self"].dim()
    at = r.node("Squeeze", index) if isinstance(index, Number) else np.array(int(index))
    return r.node("Gather", a["self"], at, axis=axis)


def _split(r: Record, a: Arguments, y: Any) -> Optional[List[str]]:
    parts = a.get("split_sizes", a.get("split_size"))
    known = isinstance(parts, list) and not r.varies(parts)
    return r.nodes("Split", len(y), a["self"], parts, axis=a.get("dim", 0)) if known else None


def _joined(r: Record, a: Arguments, y: Any) -> str:
    return r.node("Concat", *(r.cast(x, y.dtype) for x in a["tensors"]), axis=a.get("dim", 0))


def _padded(r: Record, a: Arguments, y: Any) -> Optional[str]:
    if a.get("mode", "constant") != "constant":
        return None
    pairs = [a["pad"][n : n + 2] for n in range(0, len(a["pad"]), 2)]
    axes = [-1 - n for n in range(len(pairs))]
    pads = [*(before for before, _ in pairs), *(after for _, after in pairs)]
    fill = np.array(a.get("value") or 0, np.float32 if y.is_floating_point() else np.int64)
    return r.node("Pad", a["self"], r.sizes(pads), fill, axes)


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
    "to": lambda r, a, y: r.cast(a["self"], y.dtype),
    "clone": _direct("Identity self"),
    "where": _direct("Where condition ~self ~other"),
    "masked_fill": _direct("Where mask ~value ~self"),
    "embedding": _direct("Gather weight indices"),
    "div": _divided,
    "clamp": _clamped,
    "log1p": lambda r, a, y: r.node("Log", r.node("Add", a["self"], r.cast(1.0, y.dtype))),
    "linear": lambda r, a, y: r.node("Gemm", a["input"], a["weight"], a.get("bias"), transB=1),
    "zeros": lambda r, a, y: _filled(r, r.sizes(a["size"]), 0, y),
    "zeros_like": lambda r, a, y: _filled(r, r.node("Shape", a["self"]), 0, y),
    "full_like": lambda r, a, y: _filled(r, r.node("Shape", a["self"]), a["fill_value"], y),
    "arange": _range,
    "cumsum": lambda r, a, y: r.node("CumSum", r.cast(a["self"], y.dtype), np.array(a["dim"])),
    "sum": _summed,
    "amax": _extremum("ReduceMax"),
    "amin": _extremum("ReduceMin"),
    "unsqueeze": lambda r, a, y: r.node("Unsqueeze", a["self"], [a["dim"]]),
    "squeeze": lambda r, a, y: r.node("Squeeze", a["self"], [a["dim"]]),
    "view": lambda r, a, y: r.node("Reshape", a["self"], r.sizes(a["size"])),
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
    "index_select": lambda r, a, y: r.node("Gather", a["self"], a["index"], axis=a["dim"]),
    "gather": lambda r, a, y: r.node("GatherElements", a["self"], a["index"], axis=a["dim"]),
}
