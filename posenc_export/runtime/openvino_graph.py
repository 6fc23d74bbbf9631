"""A graph under OpenVINO, in float32 or, by name, in bfloat16."""

from pathlib import Path
from typing import Any, List, NamedTuple, Optional

try:
    import openvino
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("runtime: expected openvino, got none; pip install 'posenc-export[openvino]'", name="openvino") from error

from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.onnx_files import check_external
from posenc_export.runtime.openvino_session import OpenVinoSession
from posenc_export.runtime.ort_caches import OrtCaches
from posenc_export.runtime.rules import check_graph

PRECISIONS = {"openvino": openvino.Type.f32, "openvino-bf16": openvino.Type.bf16}
TYPES = {openvino.Type.f32: "tensor(float)", openvino.Type.f16: "tensor(float16)", openvino.Type.i64: "tensor(int64)", openvino.Type.i32: "tensor(int32)"}
REMEDY = "give provider cpu"


class Port(NamedTuple):
    """An input or output as ONNX Runtime describes it (rules.check_graph)."""

    name: str
    type: str
    shape: List[Optional[int]]


class OpenVinoGraph:
    """A loaded model.onnx.

    Args:
        path: the file.
        manifest: its description.
        provider: "openvino" or "openvino-bf16".
        threads: of one operator; all cores where None.

    Raises:
        ValueError: what OpenVINO does not read or does not compute as it is written; bfloat16 on a processor without it.
    """

    def __init__(self, path: Path, manifest: Manifest, provider: str, threads: Optional[int]) -> None:
        self.manifest, self.device = manifest, provider
        check_external(path, manifest)
        compiled = _compiled(path, provider, threads)
        check_graph(manifest, _ports(compiled.inputs, manifest), _ports(compiled.outputs, manifest))
        self.session = OpenVinoSession(compiled, manifest)

    def open(self, rows: int, capacity: int) -> OrtCaches:
        """Empty caches for `rows` rows of `capacity` slots."""
        return OrtCaches.open(self.session, self.manifest, "cpu", rows, capacity)


def _compiled(path: Path, provider: str, threads: Optional[int]) -> Any:
    settings = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[provider],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads or 0,
        "ENABLE_CPU_PINNING": False,  # processes beside each other would be tied to the same cores
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # activations stay as they are beside weights of few bits
        "CPU_DENORMALS_OPTIMIZATION": True,  # shares of far keys under ALiBi, as on the provider of ONNX Runtime
    }
    core = openvino.Core()
    try:
        graph = core.read_model(path)
        _check_float64(graph)
        compiled = core.compile_model(graph, "CPU", settings)
    except RuntimeError as error:
        raise ValueError(f"runtime: expected {path.name} to be a graph that OpenVINO reads, got {_reason(error)}; {REMEDY}") from None
    if compiled.get_property("INFERENCE_PRECISION_HINT") != PRECISIONS[provider]:
        raise ValueError(f"runtime: expected a processor that computes in bfloat16 for provider {provider}, got one that does not; give provider openvino")
    return compiled


def _check_float64(graph: Any) -> None:
    """Refuse arithmetic in float64, which OpenVINO does in float32 without a word.

    Raises:
        ValueError: the first such operation.
    """
    for operation in graph.get_ops():
        if operation.get_type_name() != "Constant" and any(output.get_element_type() == openvino.Type.f64 for output in operation.outputs()):
            raise ValueError(f"runtime: expected a graph without float64 for provider openvino, got {operation.get_type_name()} in float64; {REMEDY}")


def _ports(ports: Any, manifest: Manifest) -> List[Port]:
    known = {name for value in manifest.states for name in (value.past, value.present)}
    known |= {value.name for value in (*manifest.inputs, *manifest.encoder, *manifest.outputs)}
    found = []
    for port in ports:
        names = port.get_names()  # of one tensor: that of the graph, and those of values that are the same
        name = next(iter(sorted(names & known)), port.get_any_name())
        sizes = [axis.get_length() if axis.is_static else None for axis in port.get_partial_shape()]
        found.append(Port(name, TYPES.get(port.get_element_type(), str(port.get_element_type())), sizes))
    return found


def _reason(error: Exception) -> str:
    """The line of a report that says most: the first that names what is not supported, or the last one."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "not supported" in line), lines[-1] if lines else type(error).__name__)[:300]
