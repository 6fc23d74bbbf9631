"""Load model.onnx with OpenVINO, in float32 or bfloat16."""

import math
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

try:
    import openvino
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("runtime: expected openvino, got none; pip install 'posenc-export[openvino]'", name="openvino") from error

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import B, R, S, check_graph
from posenc_export.runtime.graphs.onnx_files import check_external
from posenc_export.runtime.graphs.openvino_requests import Arrays, Requests
from posenc_export.runtime.session.buffered_caches import BufferedCaches
from posenc_export.runtime.session.state import Call, Feeds, Step

PRECISIONS = {"openvino": openvino.Type.f32, "openvino-bf16": openvino.Type.bf16}
TYPES = {openvino.Type.f32: "tensor(float)", openvino.Type.f16: "tensor(float16)", openvino.Type.i64: "tensor(int64)", openvino.Type.i32: "tensor(int32)"}
OLDEST = (2026, 4)  # earlier versions ignore attention_bias of GroupQueryAttention without an error
REMEDY = "give provider cpu"


class Port(NamedTuple):
    """An input or output, described like those of ONNX Runtime for rules.check_graph."""

    name: str
    type: str
    shape: List[Optional[int]]


class OpenVinoGraph:
    """A loaded model.onnx (runtime.session.buffered_caches.Graph).

    Args:
        path: path of model.onnx.
        manifest: manifest of the artefact.
        provider: "openvino" or "openvino-bf16".
        threads: threads per operator; None uses all cores.

    Raises:
        ValueError: OpenVINO is too old, does not support the graph or would compute it in another precision, or the processor has no bfloat16.
    """

    device, strided = "cpu", False

    def __init__(self, path: Path, manifest: Manifest, provider: str, threads: Optional[int]) -> None:
        self.manifest, self.provider = manifest, provider
        _check_version()
        check_external(path, manifest)
        compiled = _compiled(path, provider, threads)
        check_graph(manifest, _ports(compiled.inputs, manifest), _ports(compiled.outputs, manifest))
        self._requests = Requests(compiled, manifest)

    def open(self, rows: int, capacity: int) -> BufferedCaches:
        """Allocate empty caches for `rows` rows of `capacity` slots."""
        return BufferedCaches.open(self, rows, capacity)

    def run(self, caches: BufferedCaches, call: Call) -> np.ndarray:
        output = self.manifest.outputs[0]
        sizes = {B: call.rows, S: call.new, R: call.feeds["logits_index"].shape[1] if "logits_index" in call.feeds else 0}
        result = np.zeros([axis if isinstance(axis, int) else sizes[axis] for axis in output.axes], output.dtype)
        inputs, outputs = self._states(caches, call)
        self._requests.run({**call.feeds, **inputs}, {output.name: result, **outputs})
        return result

    def step(self, caches: BufferedCaches, feeds: Feeds, rows: int) -> Step:
        idle, call = list(range(rows, caches.rows)), Call(0, rows, 1, feeds)

        def run(caches: BufferedCaches) -> Tuple[np.ndarray, BufferedCaches]:
            caches = caches.with_columns(caches.columns + 1)
            return self.run(caches, call)[:, 0], caches.after(1, idle)

        return Step(run)

    def _states(self, caches: BufferedCaches, call: Call) -> Tuple[Arrays, Arrays]:
        """Return views of the states of a call's rows that the graph reads, and of those that it writes."""
        inputs: Arrays = {}
        outputs: Arrays = {}
        for state, past, present in zip(self.manifest.states, caches.past, caches.present, strict=True):
            grows = state.update == "append"
            before, after = caches.shapes(state, call.rows, call.new)
            for buffer, shape, name, found in ((past, before, state.past, inputs), (present, after, state.present, outputs)):
                found[name] = buffer.array[: math.prod(shape)].reshape(shape) if grows else buffer.array[call.first : call.first + call.rows]
        return inputs, outputs


def _compiled(path: Path, provider: str, threads: Optional[int]) -> Any:
    settings = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[provider],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads or 0,
        "ENABLE_CPU_PINNING": False,  # otherwise several processes share the same cores
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # otherwise activations are rounded to 8 bits if weights are quantized
        "CPU_DENORMALS_OPTIMIZATION": True,  # as in ort_graph.py: attention weights of ALiBi are subnormal for distant keys
    }
    core = openvino.Core()
    try:
        graph = core.read_model(path)
        _check_float64(graph)
        compiled = core.compile_model(graph, "CPU", settings)
    except RuntimeError as error:
        raise ValueError(f"runtime: expected {path.name} to be a graph that OpenVINO reads, got {_reason(error)}; {REMEDY}") from None
    if compiled.get_property("INFERENCE_PRECISION_HINT") != PRECISIONS[provider]:
        raise ValueError(f"runtime: expected a processor with bfloat16 for provider {provider}, got one without; give provider openvino")
    return compiled


def _check_version() -> None:
    """Raise ValueError if the installed OpenVINO is older than OLDEST."""
    found = openvino.__version__.partition("-")[0]
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ValueError(f"runtime: expected openvino {OLDEST[0]}.{OLDEST[1]} or later, got {found}; pip install 'posenc-export[openvino]'")


def _check_float64(graph: Any) -> None:
    """Raise ValueError for operations in float64, which the CPU plugin of OpenVINO computes in float32."""
    for operation in _operations(graph):
        if operation.get_type_name() != "Constant" and any(output.get_element_type() == openvino.Type.f64 for output in operation.outputs()):
            raise ValueError(f"runtime: expected a graph without float64 for provider openvino, got {operation.get_type_name()} in float64; {REMEDY}")


def _operations(graph: Any) -> Iterator[Any]:
    """Yield the operations of a graph and of the branches in it."""
    for operation in graph.get_ops():
        yield operation
        if operation.get_type_name() == "If":
            yield from _operations(operation.get_then_body())
            yield from _operations(operation.get_else_body())


def _ports(ports: Any, manifest: Manifest) -> List[Port]:
    known = {name for value in manifest.states for name in (value.past, value.present)}
    known |= {value.name for value in (*manifest.inputs, *manifest.encoder, *manifest.outputs)}
    found = []
    for port in ports:
        names = port.get_names()  # a tensor has several names if OpenVINO merged equal tensors
        name = next(iter(sorted(names & known)), port.get_any_name())
        sizes = [axis.get_length() if axis.is_static else None for axis in port.get_partial_shape()]
        found.append(Port(name, TYPES.get(port.get_element_type(), str(port.get_element_type())), sizes))
    return found


def _reason(error: Exception) -> str:
    """Return the most specific line of an error message: the first one about something unsupported, otherwise the last one."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "not supported" in line), lines[-1] if lines else type(error).__name__)[:300]
