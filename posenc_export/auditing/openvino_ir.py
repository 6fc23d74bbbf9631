"""OpenVINO IR, called with arrays by name as graphs in ONNX are. Variables of a stateful model are
caches: an input that is written to the variable before a call, and an output that is read after it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, List, Mapping, Set

import numpy as np

from posenc_export.auditing.graph import COUNTS_ROWS, Arrays, source_of
from posenc_export.auditing.inputs import Value
from posenc_export.runtime.session.errors import GraphError
from posenc_export.shared.refusal import refusal

# Without these, weights are rounded to few bits where a processor is faster, and caches to 8 bits.
OPTIONS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "INFERENCE_NUM_THREADS": 1,
}
PRECISIONS = {"f32": "float32", "f16": "float16"}  # by element type
PRECISIONS |= dict.fromkeys(("i4", "u4", "i8", "u8", "nf4"), "few bits")


def openvino_model(path: str, options: Mapping[str, Any]) -> Any:
    """Return the model and its compiled form, and run."""
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    compiled = core.compile_model(model, "CPU", options)
    request = compiled.create_infer_request()

    def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
        states = {state.name: state for state in request.query_state()}
        for name, state in states.items():
            state.state = openvino.Tensor(np.ascontiguousarray(inputs[name]))
        results = request.infer({n: array for n, array in inputs.items() if n not in states})
        outputs = {name: np.array(array) for port, array in results.items() for name in port.names}
        return outputs | {f"{n}_out": np.array(state.state.data) for n, state in states.items()}

    return (model, compiled), run


class IntermediateRepresentation:
    """A model in OpenVINO IR on the CPU, in float32.

    Attributes: as for Graph.
    """

    needs = "openvino"
    rounded = ""
    code = source_of(openvino_model, "path", OPTIONS)

    def __init__(self, path: Path) -> None:
        try:
            (model, compiled), self._run = openvino_model(str(path), OPTIONS)
        except RuntimeError as error:
            line = str(error).strip().splitlines()[-1]
            rule = "a model that OpenVINO loads on the CPU"
            raise refusal("audit", rule, f"{path}: {line}", "give another file") from None
        nodes = model.get_ordered_ops()
        reads = [node for node in nodes if node.get_type_name() == "ReadValue"]
        variables = [_value(node.get_variable_id(), node.output(0)) for node in reads]
        kept = [replace(value, name=f"{value.name}_out") for value in variables]
        self.inputs = [_value(_name(port), port) for port in compiled.inputs] + variables
        self.outputs = [_value(_name(port), port) for port in compiled.outputs] + kept
        self.operators: Set[str] = {node.get_type_name() for node in nodes} & COUNTS_ROWS
        self.unread: Set[str] = set()
        self.precision = _precision(nodes)

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the model. Raise GraphError if it fails."""
        try:
            return dict(self._run(feeds))
        except RuntimeError as error:
            raise GraphError(error) from error


def _name(port: Any) -> str:
    """Return a name of an input or output: not that of an inner node, if it has another."""
    return str(min(port.names, key=lambda name: ("/" in name, name)))


def _value(name: str, port: Any) -> Value:
    """Return an input, output or variable; a size that is open has the number of its axis as name,
    but that of the tokens of a cache, which is named as such.
    """
    shape, dtype = port.partial_shape, port.element_type.to_dtype().name
    axes: List[Any] = [size.get_length() if size.is_static else None for size in shape]
    if len(axes) >= 3 and axes[0] is None and axes.count(None) == 2:
        axes[axes.index(None, 1)] = "past length"
    return Value(name, dtype, tuple(axes))


def _precision(nodes: Any) -> str:
    sizes = {"float32": 0, "float16": 0, "few bits": 0}
    for node in nodes:
        if node.get_type_name() == "Constant":
            name = PRECISIONS.get(node.get_output_element_type(0).get_type_name())
            if name:
                sizes[name] += int(np.prod(node.get_output_shape(0)))
    return max(sizes, key=lambda name: sizes[name])
