"""Graphs of others, opened to be called with arrays by name."""

from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Set, Tuple

import numpy as np

from posenc_export.auditing.inputs import Value
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.refusal import refusal

Arrays = Dict[str, np.ndarray]
# Operators of weights or activations in few bits.
FEW_BITS = {
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "GatherBlockQuantized",
    "MatMulInteger",
    "MatMulNBits",
    "QLinearMatMul",
}
COUNTS_ROWS = {"GroupQueryAttention", "SparseAttention"}
HALVES = {"FLOAT16": "float16", "BFLOAT16": "bfloat16"}


class Graph:
    """A graph in ONNX, run by ONNX Runtime on the CPU with one thread.

    Attributes:
        inputs, outputs: as the graph declares them.
        operators: types of all nodes.
        precision: "float32", "float16", "bfloat16" or "few bits".
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        try:
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the types of ONNX Runtime have no common base but Exception
            line = str(error).strip().splitlines()[0]
            rule = "a graph that ONNX Runtime loads on the CPU"
            raise refusal("audit", rule, f"{path}: {line}", "give another graph") from None
        self.session = session.run
        self.inputs: List[Value] = [_value(value) for value in session.get_inputs()]
        self.outputs: List[Value] = [_value(value) for value in session.get_outputs()]
        self.operators, self.precision = _contents(path, self.inputs + self.outputs)

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the graph. Raise GraphError if it fails."""
        try:
            results = self.session(None, dict(feeds))
        except Exception as error:
            if not isinstance(error, RUN_ERRORS) and "onnxruntime" not in type(error).__module__:
                raise
            raise GraphError(error) from error
        return dict(zip([value.name for value in self.outputs], results, strict=True))


def _value(value: Any) -> Value:
    dtype = value.type.removeprefix("tensor(").removesuffix(")")
    return Value(
        value.name, {"float": "float32", "double": "float64"}.get(dtype, dtype), tuple(value.shape)
    )


def _contents(path: Path, values: List[Value]) -> Tuple[Set[str], str]:
    """Return the operators of a graph, and in what it computes."""
    import onnx_ir

    model = onnx_ir.load(path)
    operators = {node.op_type for node in model.graph.all_nodes()}
    if operators & FEW_BITS:
        return operators, "few bits"
    sizes: Dict[str, int] = {}
    for value in model.graph.initializers.values():
        if value.dtype is not None and value.const_value is not None:
            sizes[value.dtype.name] = sizes.get(value.dtype.name, 0) + value.const_value.size
    largest = max(sizes, key=lambda name: sizes[name], default="FLOAT")
    kinds = {value.dtype for value in values}
    return operators, HALVES.get(largest, "float16" if "float16" in kinds else "float32")


Run = Callable[[Mapping[str, np.ndarray]], Arrays]
