"""Graphs of others, opened to be called with arrays by name."""

import inspect
import math
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Mapping

import numpy as np

from posenc_export.auditing.facts import Claim, Facts
from posenc_export.auditing.inputs import Interface, NotPossible, NotUnrounded, Value
from posenc_export.runtime.graphs.onnx_nodes import Nodes
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.foreign import FOREIGN, brief
from posenc_export.shared.refusal import refusal

Arrays = dict[str, np.ndarray]
Run = Callable[[Mapping[str, np.ndarray]], Arrays]
# Operators of weights or activations in few bits.
FEW_BITS = {"DequantizeLinear", "DynamicQuantizeLinear", "GatherBlockQuantized"}
FEW_BITS |= {"MatMulInteger", "MatMulNBits", "QLinearMatMul"}
SLOTS = 64  # of caches whose size the caller chooses
COUNTS_ROWS = {"GroupQueryAttention", "SparseAttention"}
# What an operator takes, by a part of ONNX Runtime's message for a call that it does not take.
LIMITS = {
    "batch_size must be 1 when sequence_length > 1": "GroupQueryAttention reads several tokens "
    "behind a cache for one row only",
    "is too small for sequence_length": "GroupQueryAttention with a windowed cache takes no "
    "padding",
}
HALVES = ("float16", "bfloat16")


def source_of(function: Callable[..., Any], opened: str, *arguments: Any) -> str:
    """Return Python that defines run(inputs). function: returns what it opened, and run; it needs
    nothing of its module but annotations. opened: its first argument as Python, of `path`.
    """
    call = f"{function.__name__}({opened}, *{arguments!r})"
    return f"{inspect.getsource(function)}\n\n_, run = {call}"


def onnx_runtime(graph: Any) -> tuple[Any, Run]:
    """Open the graph of a file or its content. bfloat16, which numpy lacks, is the upper half of
    float32.
    """
    import ctypes
    import math

    import onnxruntime

    half, tensor = "tensor(bfloat16)", onnxruntime.OrtValue
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
        taken = {v.name: given(inputs[v.name], v.type) for v in session.get_inputs()}
        outputs = session.run_with_ort_values(names, taken)
        return dict(zip(names, map(returned, outputs), strict=True))

    def given(array: np.ndarray, kind: str) -> Any:
        if kind != half:
            return tensor.ortvalue_from_numpy(np.asarray(array, order="C"))
        bits = np.asarray(array.view(np.uint32) >> 16).astype(np.uint16)
        return tensor.ortvalue_from_numpy_with_onnx_type(bits, 16)

    def returned(value: Any) -> np.ndarray:
        if value.data_type() != half:
            return np.asarray(value.numpy())
        bits = (ctypes.c_uint16 * math.prod(value.shape())).from_address(value.data_ptr())
        return (np.array(bits, np.uint32) << 16).view(np.float32).reshape(value.shape())

    return session, run


class Opened:
    """A session of ONNX Runtime, called with arrays by name."""

    _run: Run

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the graph. Raise NotPossible beyond the limits of an operator, or GraphError."""
        try:
            return self._run(feeds)
        except Exception as error:
            if not isinstance(error, RUN_ERRORS) and "onnxruntime" not in type(error).__module__:
                raise
            for part, limit in LIMITS.items():
                if part in str(error):
                    raise NotPossible(limit) from error
            raise GraphError(error) from error


class Graph(Opened):
    """A graph in ONNX, run by ONNX Runtime on the CPU with one thread.

    Attributes:
        inputs, outputs: as the graph declares them.
        operators: types of all nodes.
        precision: "float32", "float16", "bfloat16" or "few bits".
        rounded: in what its weights are rounded, such as "8 bits"; "" if they are not.
        unread: inputs that become outputs and have no other use.
        code: Python that loads the graph from `path` and defines run(inputs).
        needs: packages of the code.
    """

    needs = "onnxruntime"

    def __init__(self, path: Path) -> None:
        import onnx_ir

        from posenc_export.auditing.unrounded import read, rounds

        self.path, self.code = path, source_of(onnx_runtime, "path")
        self.form: Unrounded | None = None
        try:
            session, self._run = onnx_runtime(str(path))
        except Exception as error:  # the types of ONNX Runtime have no common base but Exception
            line = brief(error)
            rule = "a graph that ONNX Runtime loads on the CPU"
            raise refusal("audit", rule, f"{path}: {line}", "give another graph") from None
        self.outputs: list[Value] = [_value(value, {}) for value in session.get_outputs()]
        model = onnx_ir.load(path)
        sizes = _cache_sizes(model)
        self.inputs: list[Value] = [_value(value, sizes) for value in session.get_inputs()]
        self.nodes = read(model)
        self.unread = _unread(self.nodes)
        self.operators = {node.operator for node in self.nodes.walk()}
        self.rounded, self.precision = rounds(self.nodes), _precision(self.nodes, self.outputs)
        if self.rounded.endswith("bits") or self.operators & FEW_BITS:
            self.precision = "few bits"

    def unrounded(self) -> "Unrounded":
        """Return the float32 form. Raise NotUnrounded if it is not known."""
        self.form = Unrounded(self.path)
        return self.form

    def prove(self, interface: Interface, facts: Facts) -> list[Claim]:
        """Prove what the graph does at every length, or its float32 form if that was opened."""
        from posenc_export.auditing import proving

        try:
            return proving.prove((self.form or self).nodes, interface, facts)
        except FOREIGN as error:
            return [Claim("calls", "not proved", brief(error))]


class Unrounded(Opened):
    """The float32 form of a graph, which runs as that does. path: of the graph.

    Attributes:
        weights: constants whose numbers were rounded, as unrounded.Weight by name.
        numbers: what they stand for, by name.
    """

    def __init__(self, path: Path) -> None:
        from posenc_export.auditing.unrounded import unrounded

        self.nodes, content, self.weights = unrounded(path)
        known = self.nodes.constants
        self.numbers = {name: known[name].array(Path()) for name in self.weights}
        try:
            _, self._run = onnx_runtime(content)
        except Exception as error:  # as in Graph
            raise NotUnrounded(f"its float32 form is not loaded: {brief(error)}") from None


def _value(value: Any, sizes: Mapping[str, Mapping[int, int]]) -> Value:
    """Return an input or output. A size that is written as a string is a number."""
    dtype = value.type.removeprefix("tensor(").removesuffix(")")
    axes = [int(axis) if isinstance(axis, str) and axis.isdigit() else axis for axis in value.shape]
    for axis, size in sizes.get(value.name, {}).items():
        axes[axis] = axes[axis] if isinstance(axes[axis], int) else size
    names = {"float": "float32", "double": "float64"}
    return Value(value.name, names.get(dtype, dtype), tuple(axes))


def _cache_sizes(model: Any) -> dict[str, dict[int, int]]:
    """Return sizes of axes of caches that the inputs of GroupQueryAttention leave open: the head
    size, and a fixed number of slots where the node demands it (sliding_window_cache).
    """
    sizes: dict[str, dict[int, int]] = {}
    for node in model.graph.all_nodes():
        if node.op_type != "GroupQueryAttention" or node.outputs[0].shape is None:
            continue
        width, keeps = node.outputs[0].shape[-1], node.attributes.get("sliding_window_cache")
        axes = {2: SLOTS} if keeps is not None and keeps.value else {}
        if isinstance(width, int):
            axes[3] = width // node.attributes["num_heads"].value
        sizes |= {value.name: axes for value in node.inputs[3:5] if value is not None}
    return sizes


def _unread(graph: Nodes) -> set[str]:
    """Return the inputs that an Identity makes an output, and that nothing else reads."""
    repeated, read = set[str](), set[str]()
    for node in graph.walk():
        repeats = node.operator == "Identity" and node.outputs[0] in graph.outputs
        (repeated if repeats else read).update(node.inputs)
    return (repeated - read) & graph.inputs.keys()


def _precision(graph: Nodes, outputs: list[Value]) -> str:
    """Return the type of most numbers of a graph or, if none are in half precision, of outputs."""
    sizes = Counter[str]()
    for constant in graph.constants.values():
        sizes[constant.element] += math.prod(constant.shape)
    largest = [element for element, _ in sizes.most_common(1)]
    kinds = (*largest, *(value.dtype for value in outputs))
    return next((kind for kind in kinds if kind in HALVES), "float32")
