"""Load model.onnx with OpenVINO, in float32 or bfloat16, and run it on arrays."""

from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

try:
    import openvino
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "runtime: expected openvino, got none; pip install 'posenc-export[openvino]'",
        name="openvino",
    ) from error

from posenc_export.runtime.artefact.graph_inputs import B, R, S
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import check_graph
from posenc_export.runtime.graphs.onnx_files import check_external
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.graph import BoundRun, Feeds, GraphRun, StateMemory
from posenc_export.shared.numerics import LEVELS
from posenc_export.shared.refusal import refusal

PRECISIONS = {"openvino": openvino.Type.f32, "openvino-bf16": openvino.Type.bf16}
TYPES = {
    openvino.Type.f32: "tensor(float)",
    openvino.Type.f16: "tensor(float16)",
    openvino.Type.i64: "tensor(int64)",
    openvino.Type.i32: "tensor(int32)",
}
OLDEST = (2026, 4)  # earlier versions ignore attention_bias of GroupQueryAttention without an error
ONE_ROW = "GroupQueryAttention"  # OpenVINO 2026.4 supports it for a single row without padding
REMEDY = "give provider cpu"
Arrays = Dict[str, np.ndarray]


class Port(NamedTuple):
    """An input or output, described like those of ONNX Runtime for rules.check_graph."""

    name: str
    type: str
    shape: List[Optional[int]]


class OpenVinoGraph:
    """A loaded model.onnx (runtime.session.graph.Graph) on provider "openvino" or "openvino-bf16".
    Raises ValueError if OpenVINO is too old, does not support the graph or would compute it in
    another precision.
    """

    device, strided = "cpu", False

    def __init__(
        self, path: Path, manifest: Manifest, provider: str, threads: Optional[int]
    ) -> None:
        self.manifest, self.provider = manifest, provider
        version = openvino.__version__.partition("-")[0]
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            rule = f"openvino {OLDEST[0]}.{OLDEST[1]} or later"
            raise refusal("runtime", rule, version, "pip install 'posenc-export[openvino]'")
        check_external(path, manifest)
        compiled = _compiled(path, provider, threads)
        check_graph(manifest, _ports(compiled.inputs, manifest), _ports(compiled.outputs, manifest))
        self._compiled = compiled
        self._idle: List[Any] = []  # inference requests; each run has its own, whatever its thread
        values = (*manifest.inputs, *manifest.encoder, *manifest.outputs)
        self._axes: Dict[str, Tuple[Any, ...]] = {value.name: value.axes for value in values}
        for state in manifest.states:
            self._axes |= dict.fromkeys((state.past, state.present), state.axes)
        self._in_place = [state for state in manifest.states if state.in_place]
        self._infer = self._infer_rows if ONE_ROW in manifest.operators else _infer

    def run(self, run: GraphRun, states: Sequence[StateMemory]) -> np.ndarray:
        output, result = self.manifest.outputs[run.output], run.result
        if result is None:
            requested = run.feeds.get("logits_index", np.empty((0, 0))).shape[1]
            sizes = {B: run.rows, S: run.new, R: requested}
            shape = [axis if isinstance(axis, int) else sizes[axis] for axis in output.axes]
            result = np.zeros(shape, output.dtype)
        self._run(run.feeds, states, {output.name: result})
        return result

    def repeat(self, feeds: Feeds, states: Sequence[StateMemory], result: np.ndarray) -> BoundRun:
        return lambda: self._run(feeds, states, {self.manifest.outputs[0].name: result})

    def _run(self, feeds: Feeds, states: Sequence[StateMemory], outputs: Arrays) -> None:
        read = {memory.state.past: memory.arrays[0] for memory in states}
        written = {memory.state.present: memory.arrays[1] for memory in states}
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        try:
            self._infer(request, {**feeds, **read}, {**outputs, **written})
        except RuntimeError as error:
            raise GraphError(error) from None
        self._idle.append(request)

    def _infer_rows(self, request: Any, inputs: Arrays, outputs: Arrays) -> None:
        """Run each row alone and without padding. For caches in place the graph returns a copy of
        the valid slots, from which the new slots are copied.
        """
        rows, new = inputs[self.manifest.inputs[0].name].shape[:2]
        copied = {state.present for state in self._in_place}
        written = {name: array for name, array in outputs.items() if name not in copied}
        for row in range(rows):
            # Slots of the row after the call, including padding if rows share columns.
            lengths = inputs.get("seqlens_k")
            total = inputs["attention_mask"].shape[1] if lengths is None else int(lengths[row]) + 1
            # Less than `new` for a row with padding, which has no earlier tokens (Feeder).
            count = min(new, total)
            read, results = (self._parts(arrays, row, count) for arrays in (inputs, written))
            if "total_sequence_length" in read:
                read["total_sequence_length"] = np.array(total, np.int32)
            _infer(request, read, results)
            for state in self._in_place:
                fresh = (slice(None),) * (state.axis - 1) + (slice(total - count, total),)
                present = request.get_tensor(state.present).data
                outputs[state.present][(row, *fresh)] = present[(0, *fresh)]

    def _parts(self, arrays: Arrays, row: int, count: int) -> Arrays:
        """Return the parts for a row and its first `count` new tokens, views if rows are first."""
        chosen = {B: slice(row, row + 1), S: slice(count)}
        at = {name: tuple(chosen.get(a, slice(None)) for a in self._axes[name]) for name in arrays}
        return {name: np.ascontiguousarray(array[at[name]]) for name, array in arrays.items()}


def _infer(request: Any, inputs: Arrays, outputs: Arrays) -> None:
    for name, array in (*inputs.items(), *outputs.items()):
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    request.infer()


def _compiled(path: Path, provider: str, threads: Optional[int]) -> Any:
    settings = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[provider],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads or 0,
        "ENABLE_CPU_PINNING": False,  # otherwise several processes share the same cores
        # Otherwise activations are rounded to 8 bits if weights are quantized.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        # As in ort_options.py: attention weights of ALiBi are subnormal for distant keys.
        "CPU_DENORMALS_OPTIMIZATION": True,
    }
    core = openvino.Core()
    try:
        graph = core.read_model(path)
        _check_float64(graph)
        compiled = core.compile_model(graph, "CPU", settings)
    except RuntimeError as error:
        rule = f"runtime: expected {path.name} to be a graph that OpenVINO reads"
        raise ValueError(f"{rule}, got {_reason(error)}; {REMEDY}") from None
    if compiled.get_property("INFERENCE_PRECISION_HINT") != PRECISIONS[provider]:
        rule = f"runtime: expected a processor with bfloat16 for provider {provider}"
        raise ValueError(f"{rule}, got one without; give provider openvino")
    return compiled


def _check_float64(graph: Any) -> None:
    """Raise ValueError for float64, which the CPU plugin of OpenVINO computes in float32. Rows of
    rotations in two levels may be: they then have an error of 1.4e-7.
    """
    rows = set[str]()
    for operation in _operations(graph):
        types = [output.get_element_type() for output in operation.outputs()]
        name, own = operation.get_type_name(), operation.get_friendly_name()
        sources = {source.get_node().get_friendly_name() for source in operation.input_values()}
        if openvino.Type.f64 not in types:
            continue
        if own.rpartition(".")[2] in LEVELS or sources & rows:
            rows.add(own)
        elif name != "Constant":
            rule = "runtime: expected a graph without float64 for provider openvino"
            raise ValueError(f"{rule}, got {name} in float64; {REMEDY}")


def _operations(graph: Any) -> Iterator[Any]:
    for operation in graph.get_ordered_ops():
        yield operation
        if operation.get_type_name() == "If":
            yield from _operations(operation.get_then_body())
            yield from _operations(operation.get_else_body())


def _ports(ports: Any, manifest: Manifest) -> List[Port]:
    known = {name for value in manifest.states for name in (value.past, value.present)}
    known |= {value.name for value in (*manifest.inputs, *manifest.encoder, *manifest.outputs)}
    described = []
    for port in ports:
        names = port.get_names()  # a tensor has several names if OpenVINO merged equal tensors
        name = next(iter(sorted(names & known)), port.get_any_name())
        kind = port.get_element_type()
        sizes = [axis.get_length() if axis.is_static else None for axis in port.get_partial_shape()]
        described.append(Port(name, TYPES.get(kind, str(kind)), sizes))
    return described


def _reason(error: Exception) -> str:
    """Return the line of an error message about something unsupported, or its last line."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    unsupported = [line for line in lines if "not supported" in line]
    return (unsupported[:1] or lines[-1:] or [type(error).__name__])[0][:300]
