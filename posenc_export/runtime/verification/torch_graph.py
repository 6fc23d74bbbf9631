"""Read the graph of a torch.export program as nodes of ONNX, for the check "indices".

Operators that positions and sizes determine become nodes that compute the same in every call. The
others keep their names, and nothing is proved of them. Sizes are tensors of shape [1].
"""

import operator
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs import onnx_parts, torch_graph
from posenc_export.runtime.graphs.onnx_nodes import TYPES, Constant, Nodes
from posenc_export.runtime.verification.integer_graph import TOKENS, IntegerPart, integer_part
from posenc_export.runtime.verification.symbolic import Untranslated

OPSET = 24  # has TensorScatter
LAST = (1 << 63) - 1  # the end of a slice without an end
CODES = {name: code for code, name in TYPES.items()}  # TensorProto.DataType
# Names that ONNX has for operators on computed numbers
NAMES = {"embedding": "Gather", "gather": "GatherElements", "linear": "Gemm", "matmul": "MatMul"}
NAMES |= {"scaled_dot_product_attention": "Attention", "softmax": "Softmax"}
MEMORY = "memory"  # stands for a tensor that an operator writes to, of which nothing is proved
WRITES = {"index_put_": "values", "index_copy_": "source"}  # argument with the new numbers
Arguments = Mapping[str, Any]  # arguments of an operator, by name in its schema


def part_of_program(folder: Path, manifest: Manifest) -> IntegerPart:
    """Return the integer part of model.pt2, with the constants that it reads.

    Raises:
        OSError, ValueError: as torch_graph.read_program.
        Untranslated: the graph has something that graphs of this package do not have.
    """
    program = torch_graph.read_program(folder / graph_file(manifest), manifest)
    graph, specs = Program(), iter(program.graph_signature.input_specs)
    tensors = iter(torch_graph.weights_of(program))
    states = [state.past for state in manifest.states]
    ends = ([each.name for each in values] for values in (manifest.inputs, manifest.encoder))
    inputs = iter([*next(ends), *states, *next(ends)])
    for node in program.graph.nodes:
        if node.op == "call_function":
            graph.add(node)
        elif node.op == "placeholder" and (name := next(specs).target) is not None:
            graph.store(node, name, next(tensors))
        elif node.op == "placeholder":
            graph.begin(node, next(inputs))
    if manifest.stores_positions:
        graph.end("present_positions", states[0])
    return graph.part()


class Program:
    """Writes the nodes of a program in order as nodes of ONNX. Operands are names, numbers, lists
    and arrays of numbers, and nodes of the program.

    Attributes:
        graph: the nodes of ONNX, and names and shapes of stored tensors.
        names: names of the results, by node of the program.
    """

    def __init__(self) -> None:
        self.graph, self.names = Nodes(opsets={"": OPSET}), dict[Any, list[str]]()
        self._inputs: dict[str, Any] = {}  # nodes by name
        self._stored: dict[Any, Any] = {}  # by node, results that are the same in every call
        self._whole: set[Any] = set()  # nodes that positions and sizes determine
        self._known: dict[str, list[str]] = {}  # outputs by text of a node: equal ones are one
        self._place = ""  # begins the names of results

    def store(self, node: Any, name: str, result: Any) -> None:
        """Add a node whose result is the same in every call."""
        self._stored[node] = result
        self._whole.add(node)
        if hasattr(result, "dim"):
            shape = tuple(result.shape)
            self.graph.constants[name] = Constant(name, element(result.dtype), shape)
            self.names[node] = [name]

    def begin(self, node: Any, name: str) -> None:
        """Add an input."""
        self._inputs[name], self.names[node] = node, [name]
        self.graph.inputs[name] = element(value(node).dtype)
        if not value(node).is_floating_point() and name not in TOKENS:
            self._whole.add(node)

    def end(self, name: str, state: str) -> None:
        """Add an output: the memory of an input after the call."""
        memory = self.names[self._inputs[state]]
        self.graph.nodes.append(onnx_parts.new_node("Identity", memory, [name]))
        self.graph.outputs.append(name)

    def part(self) -> IntegerPart:
        """Return the integer part, with the numbers of the constants that it reads."""
        part = integer_part(self.graph)
        read = {name for node in part.nodes for name in node.inputs}
        for node, tensor in self._stored.items():
            if (name := self.names.get(node, [""])[0]) in read:
                numbers = tensor.detach()
                numbers = numbers.float() if element(numbers.dtype) == "bfloat16" else numbers
                part.graph.constants[name] = onnx_parts.constant(name, numbers.contiguous().numpy())
        return part

    def add(self, node: Any) -> None:
        """Add a node. Raise Untranslated for an unknown operator on sizes, or that writes."""
        from torch.fx.node import map_arg

        target, read = node.target, {*node.all_input_nodes}
        self._place, schema = node.name, getattr(target, "_schema", None)
        if read <= self._stored.keys() and not (schema and schema.is_mutable):
            known, named = map_arg((node.args, node.kwargs), self._stored.__getitem__)
            self.store(node, node.name, target(*known, **named))
            return
        if read <= self._whole:
            self._whole.add(node)
        if target is operator.getitem:
            self.names[node] = [self.names[node.args[0]][node.args[1]]]
        elif schema is None:
            if target.__name__ not in NUMBERS:
                raise Untranslated(f"operator {target.__name__} on sizes")
            numbers = [[x] if isinstance(x, int) else x for x in node.args]
            self.names[node] = self.nodes(NUMBERS[target.__name__], 1, *numbers)
        else:
            accepted = [each.name for each in schema.arguments]
            arguments = {**dict(zip(accepted, node.args, strict=False)), **node.kwargs}
            self.names[node] = self._made(node, schema, arguments)

    def _made(self, node: Any, schema: Any, a: Arguments) -> list[str]:
        """Write an operator, and return the names of its results."""
        name, result = schema.name.partition("::")[2], value(node)
        if schema.is_mutable:
            return [self._changed(name, a)]
        if name == "sym_size":
            self._whole.update([node] if a["self"] in self._inputs.values() else [])
            return [self.size(a["self"], a["dim"])]
        if node in self._whole and name in OPERATORS:
            if (made := OPERATORS[name](self, a, result)) is not None:
                return [made]
        count = len(result) if isinstance(result, (list, tuple)) else 1
        plain = {n: x for n, x in a.items() if isinstance(x, (int, float, str))}
        tensors = [x for x in node.all_input_nodes if not is_size(x)]
        return self.nodes(NAMES.get(name, name), count, *tensors, **plain)

    def _changed(self, name: str, a: Arguments) -> str:
        """Write the update of a cache by an operator, and return the name of the new cache."""
        if name not in WRITES or a.get("accumulate"):
            raise Untranslated(f"operator {name}, which writes")
        memory, tokens = a["self"], next(iter(self._inputs.values()))
        if name == "index_put_":
            rows, columns = (self.name(index) for index in a["indices"])
            first = self.node("Gather", columns, np.array(0), axis=1)
        else:
            rows, columns = "", self.node("Unsqueeze", a["index"], [0])
            first = self.node("Slice", a["index"], [0], [1])
        sizes = self.sizes([self.size(tokens, axis) for axis in (0, 1)])
        self.node(name, MEMORY, rows, self.node("Expand", columns, sizes))
        source = memory
        while source.op != "placeholder":  # memory may be a view of a cache
            source = source.args[0]
        written = (user for user in memory.users if user in self.names)
        aliases = (x.alias_info for user in written for x in user.target._schema.returns)
        views = source is not memory or any(aliases)
        if source in self._stored or (views and source in self._whole):
            raise Untranslated("a cache that is read under two names")
        if source in self._whole:
            made = self.node("TensorScatter", memory, a[WRITES[name]], first, axis=1)
        else:
            made = self.node("Memory", MEMORY, memory)
        self.names[memory] = [made]
        return made

    def name(self, x: Any) -> str:
        """Return the name of an operand; empty for None."""
        if isinstance(x, str) or x is None:
            return x or ""
        if is_node(x):
            return self.names[x][0]
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

    def nodes(self, operator: str, outputs: int, *operands: Any, **attributes: Any) -> list[str]:
        """Add a node, and return the names of its outputs."""
        read = [self.name(x) for x in operands]
        while read and not read[-1]:
            read.pop()
        key = repr((operator, read, attributes))
        if key not in self._known:
            number = len(self.graph.nodes)
            made = [f"{self._place} {operator} {number}.{n}" for n in range(outputs)]
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
    """Return an operand, or the result of a node that the trace recorded: a tensor without numbers,
    a size, or None.
    """
    return x.meta.get("val") if is_node(x) else x


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


# Takes a program, arguments of an operator, and its result without numbers. Returns the name of the
# result, or None if it does not write an operator with these arguments.
Writer = Callable[[Program, Arguments, Any], str | None]


def _direct(text: str) -> Writer:
    """Return a writer of one node. text: an operator of ONNX and names of arguments. ~ casts an
    argument to the type of the result, and = casts two to their common type.
    """
    operator, *names = text.split()

    def write(p: Program, a: Arguments, y: Any) -> str | None:
        import torch

        of_bits = operator in ("And", "Or") and element(y.dtype) != "bool"
        if a.get("alpha", 1) != 1 or of_bits:
            return None
        common = torch.result_type(value(a["self"]), value(a["other"])) if "=" in text else y.dtype
        read = [(name.lstrip("~="), name[0] in "~=") for name in names]
        return p.node(operator, *(p.cast(a[n], common) if cast else a[n] for n, cast in read))

    return write


def _divided(p: Program, a: Arguments, y: Any) -> str | None:
    mode, x, other = a.get("rounding_mode"), a["self"], a["other"]
    if mode is None or y.is_floating_point():
        quotient = p.node("Div", p.cast(x, y.dtype), p.cast(other, y.dtype))
        return {None: quotient, "floor": p.node("Floor", quotient)}.get(mode)
    x, other = p.cast(x, y.dtype), p.cast(other, y.dtype)
    if mode == "floor":  # Div of whole numbers rounds towards zero
        x = p.node("Sub", x, p.node("Mod", x, other))
    return p.node("Div", x, other)


def _clamped(p: Program, a: Arguments, y: Any) -> str:
    low, high = (None if a.get(n) is None else p.cast(a[n], y.dtype) for n in ("min", "max"))
    return p.node("Clip", p.cast(a["self"], y.dtype), low, high)


def _filled(p: Program, shape: Any, number: Any, y: Any) -> str:
    return p.node("Expand", p.cast(number, y.dtype), shape)


def _range(p: Program, a: Arguments, y: Any) -> str | None:
    if a.get("step", 1) != 1 or element(y.dtype) != "int64":
        return None
    ends = [a.get("start", 0), a["end"]]
    scalars = [p.node("Squeeze", x) if is_size(x) else np.array(x) for x in ends]
    return p.node("Range", *scalars, np.array(1))


def _summed(p: Program, a: Arguments, y: Any) -> str:
    axes = list(range(rank(a["self"])) if a.get("dim") is None else a["dim"])
    read = p.cast(a["self"], y.dtype)
    return p.node("ReduceSum", read, axes, keepdims=int(a.get("keepdim", False)))


def _transposed(p: Program, a: Arguments, y: Any) -> str:
    count = rank(a["self"])
    order, first, second = [*range(count)], a.get("dim0", 0) % count, a.get("dim1", 1) % count
    order[first], order[second] = second, first
    return p.node("Transpose", a["self"], perm=[k % count for k in a.get("dims", order)])


def _sliced(p: Program, a: Arguments, y: Any) -> str | None:
    if a.get("step", 1) != 1:
        return None
    start, end = a.get("start"), a.get("end")
    start, end = 0 if start is None else start, LAST if end is None else end
    if (start, end) == (0, LAST):
        return p.name(a["self"])
    return p.node("Slice", a["self"], p.sizes([start]), p.sizes([end]), [a.get("dim", 0)])


def _selected(p: Program, a: Arguments, y: Any) -> str:
    index, axis = a["index"], a["dim"] % rank(a["self"])
    at = p.node("Squeeze", index) if is_size(index) else np.array(index)
    return p.node("Gather", a["self"], at, axis=axis)


def _padded(p: Program, a: Arguments, y: Any) -> str | None:
    if a.get("mode", "constant") != "constant":
        return None
    pairs = [a["pad"][n : n + 2] for n in range(0, len(a["pad"]), 2)]
    axes = [-1 - n for n in range(len(pairs))]
    pads = [*(before for before, _ in pairs), *(after for _, after in pairs)]
    fill = np.array(a.get("value") or 0, np.float32 if y.is_floating_point() else np.int64)
    return p.node("Pad", a["self"], p.sizes(pads), fill, axes)


# Operators of ONNX by their names in torch, and in the module `operator` for whole numbers
COMPARED = {"ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual", "lt": "Less"}
COMPARED["eq"] = "Equal"
ARITHMETIC = {"add": "Add", "sub": "Sub", "mul": "Mul"}
NUMBERS = {**ARITHMETIC, **COMPARED}
UNARY = "abs neg floor exp log sin cos relu sigmoid tanh sqrt gelu silu"
ARITHMETIC |= {"remainder": "Mod", "maximum": "Max", "minimum": "Min"}
OPERATORS: dict[str, Writer] = {
    **{n: _direct(f"{operator} =self =other") for n, operator in COMPARED.items()},
    **{n: _direct(f"{operator} ~self ~other") for n, operator in ARITHMETIC.items()},
    **{n: _direct(f"{n.capitalize()} ~self") for n in UNARY.split()},
    **{n: _direct("And self other") for n in ("__and__", "logical_and")},
    **{n: _direct("Or self other") for n in ("__or__", "logical_or")},
    "rsub": _direct("Sub ~other ~self"),
    "logical_not": _direct("Not self"),
    "ne": lambda p, a, y: p.node("Not", OPERATORS["eq"](p, a, y)),
    "to": lambda p, a, y: p.cast(a["self"], y.dtype),
    "clone": _direct("Identity self"),
    "where": _direct("Where condition ~self ~other"),
    "masked_fill": _direct("Where mask ~value ~self"),
    "embedding": _direct("Gather weight indices"),
    "div": _divided,
    "clamp": _clamped,
    "log1p": lambda p, a, y: p.node("Log", p.node("Add", a["self"], p.cast(1.0, y.dtype))),
    "pow": _direct("Pow ~self ~exponent"),
    "linear": lambda p, a, y: p.node("Gemm", a["input"], a["weight"], a.get("bias"), transB=1),
    "zeros": lambda p, a, y: _filled(p, p.sizes(a["size"]), 0, y),
    "zeros_like": lambda p, a, y: _filled(p, p.node("Shape", a["self"]), 0, y),
    "full_like": lambda p, a, y: _filled(p, p.node("Shape", a["self"]), a["fill_value"], y),
    "arange": _range,
    "cumsum": lambda p, a, y: p.node("CumSum", p.cast(a["self"], y.dtype), np.array(a["dim"])),
    "sum": _summed,
    "unsqueeze": lambda p, a, y: p.node("Unsqueeze", a["self"], [a["dim"]]),
    "squeeze": lambda p, a, y: p.node("Squeeze", a["self"], [a["dim"]]),
    "view": lambda p, a, y: p.node("Reshape", a["self"], p.sizes(a["size"])),
    "expand": lambda p, a, y: p.node(
        "Expand", a["self"], p.sizes([1 if n == -1 else n for n in a["size"]])
    ),
    "transpose": _transposed,
    "t": _transposed,
    "permute": _transposed,
    "slice": _sliced,
    "select": _selected,
    "cat": lambda p, a, y: p.node(
        "Concat", *(p.cast(x, y.dtype) for x in a["tensors"]), axis=a.get("dim", 0)
    ),
    "pad": _padded,
    "index_select": lambda p, a, y: p.node("Gather", a["self"], a["index"], axis=a["dim"]),
    "gather": lambda p, a, y: p.node("GatherElements", a["self"], a["index"], axis=a["dim"]),
}
