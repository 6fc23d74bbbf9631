"""Load model.onnx with ONNX Runtime. Buffers are bound to inputs and outputs by address, on the host or on the device."""

import functools
import platform
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any, Mapping, Optional, Tuple

import numpy as np

try:
    import onnxruntime
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("runtime: expected onnxruntime, got none; pip install 'posenc-export[cpu]' or 'posenc-export[gpu]'", name="onnxruntime") from error

from posenc_export.runtime.artefact.files import utf8
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import check_graph
from posenc_export.runtime.graphs import cuda, cuda_placement
from posenc_export.runtime.graphs.cuda_steps import DeviceFeeds
from posenc_export.runtime.graphs.mapped_weights import mapped_weights
from posenc_export.runtime.graphs.onnx_files import check_external, refused
from posenc_export.runtime.session.buffered_caches import BufferedCaches
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.runtime.session.state import Call, Feeds, Step
from posenc_export.runtime.session.stepper import CONSTANT

# SkipLayerNormalization takes 1.7 to 7 times as long on a CPU as the Add and LayerNormalization that it replaces (ONNX Runtime 1.31, widths 256 to 1536).
SLOWER = {"cpu": ["SkipLayerNormFusion"], "cuda": [], "webgpu": []}
# For DequantizeLinear before MatMul: 4-bit products that do not round activations. For 8 bits they are slow, and weights are dequantized when they are loaded instead.
FOUR_BITS, EIGHT_BITS = {"session.qdq_matmulnbits_accuracy_level": "0"}, {"session.disable_quant_qdq": "1"}
FLOAT_ACTIVATIONS = {"int4": FOUR_BITS, "int4-128": FOUR_BITS, "int8": EIGHT_BITS, "int8-32": EIGHT_BITS, "keep": {}}
HOST_ONLY = {"GroupQueryAttention", "MoE", "QMoE"}  # operators of target ort that have no float32 kernel for CUDA, or one with other rules
PROVIDERS = {"cpu": ("CPUExecutionProvider", {}), "cuda": (cuda.NAME, cuda.OPTIONS), "webgpu": ("WebGpuExecutionProvider", {})}
INSTALL_WEBGPU = "pip install onnxruntime-webgpu in an environment without onnxruntime"


def choose_provider(name: str, manifest: Manifest) -> str:
    """Return the provider for an artefact: "cpu", "cuda" or "webgpu". "auto" chooses cuda if this ONNX Runtime is built with it and both machine and artefact can
    run it. The first artefact that the machine cannot run on cuda, although ONNX Runtime is built with it, causes a warning that says why.

    Raises:
        ValueError: the machine lacks what the provider needs, or the artefact has operators or a dtype without kernels for it.
    """
    present = onnxruntime.get_available_providers()
    host_only = manifest.dtype == "float32" and not HOST_ONLY.isdisjoint(manifest.operators)
    if name == "cpu" or (name == "auto" and (host_only or cuda.NAME not in present)):
        if manifest.dtype == "bfloat16":
            raise ValueError("runtime: expected provider cuda for an artefact in bfloat16, got cpu; load it on a machine that runs cuda, or export dtype float16")
        return "cpu"
    if name == "webgpu":
        if PROVIDERS[name][0] not in present:
            raise ValueError(f"runtime: expected an ONNX Runtime with provider {name}, got one with {', '.join(present)}; {INSTALL_WEBGPU}")
        return name
    if host_only:
        remedy = "export target onnx-static, or ort-cuda for half precision"
        raise ValueError(f"runtime: expected provider cpu for target {manifest.target} in float32, got {name}; {remedy}")
    missing = cuda.obstacle() or cuda.cudnn_obstacle(manifest)
    if missing is None:
        return "cuda"
    if name == "cuda" or manifest.dtype == "bfloat16":
        raise ValueError(f"runtime: expected a machine that can run provider cuda, got {missing.found}; {missing.remedy}")
    _warn_once(f"runtime: provider auto chose cpu, because provider cuda cannot run here: got {missing.found}; {missing.remedy}")
    return "cpu"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)  # at the call of `load`


def _saturates() -> bool:
    """Whether products of unsigned and signed bytes may saturate: on x86 CPUs without VNNI. True on x86 if the CPU's features are not known."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        return "vnni" not in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


class OrtGraph:
    """A loaded model.onnx (runtime.session.buffered_caches.Graph).

    Args:
        path: the file model.onnx.
        manifest: description of the graph.
        provider: "cpu" or "cuda".
        threads: threads per operator; None uses all cores.
    """

    strided = False

    def __init__(self, path: Path, manifest: Manifest, provider: str, threads: Optional[int]) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Under ALiBi, attention weights of distant keys are below 1e-38. As subnormal numbers they slow the product with the values by 1.7x at 8192 keys.
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        if manifest.operators.get("MatMulIntegerToFloat") and _saturates():
            options.add_session_config_entry("session.x64quantprecision", "1")  # uses products of unsigned bytes, which are exact but slower
        if manifest.weights is not None and manifest.weights.activations == "float32":
            for name, value in FLOAT_ACTIVATIONS[manifest.weights.format].items():
                options.add_session_config_entry(name, value)
        if threads:
            options.intra_op_num_threads = threads
        self.manifest, self.provider = manifest, provider
        self.device = "cuda" if provider == "cuda" else "cpu"  # WebGPU: the Python binding cannot allocate on the device, so caches stay on the host
        check_external(path, manifest)
        # Whether the graph reads no input both on the host and on the device, to which it would copy it from memory that is bound once.
        self.reads_device = self.device == "cuda" and not cuda_placement.placed(path).copies["to the device"]
        with refused(path), mapped_weights(options, path.parent, manifest, provider) as weights:
            self.session = onnxruntime.InferenceSession(
                utf8(path), options, providers=[PROVIDERS[provider]], enable_fallback=0, disabled_optimizers=SLOWER[provider]
            )
            self.session.posenc_weights = weights  # the session reads them, so they must live as long
            check_graph(manifest, self.session.get_inputs(), self.session.get_outputs())

    def open(self, rows: int, capacity: int) -> BufferedCaches:
        """Allocate empty caches for `rows` rows of `capacity` slots."""
        return BufferedCaches.open(self, rows, capacity)

    def run(self, caches: BufferedCaches, call: Call) -> np.ndarray:
        binding = self._bind(caches, call.feeds, call.first, call.rows, call.new)
        binding.bind_output(self.manifest.outputs[call.output].name, "cpu")
        try:
            self.session.run_with_iobinding(binding)
        except RUN_ERRORS as error:
            raise GraphError(error) from None
        return np.array(binding.get_outputs()[len(caches.past)].numpy())  # outputs come in the order they were bound

    def step(self, caches: BufferedCaches, feeds: Feeds, rows: int) -> Step:
        output, new = self.manifest.outputs[0], feeds[self.manifest.inputs[0].name].shape[1]
        result = np.zeros([axis if isinstance(axis, int) else size for axis, size in zip(output.axes, (rows, new, 0), strict=True)], output.dtype)
        session, pointer, last, idle = self.session, result.ctypes.data, result[:, 0] if new == 1 else result, list(range(rows, caches.rows))

        def bound(caches: BufferedCaches, addresses: Mapping[str, int] = MappingProxyType({})) -> Any:
            binding = self._bind(caches, feeds, 0, rows, new, addresses)
            binding.bind_output(output.name, "cpu", 0, result.dtype, result.shape, pointer)
            return binding

        def run(caches: BufferedCaches) -> Tuple[np.ndarray, BufferedCaches]:
            caches = caches.with_columns(caches.columns + 1)
            try:
                session.run_with_iobinding(bound(caches))
            except RUN_ERRORS as error:
                raise GraphError(error) from None
            return last, caches.after(1, idle)

        in_place = all(state.update == "in_place" for state in self.manifest.states)
        if self.provider == "cpu" and in_place:
            return Step(run, functools.partial(session.run_with_iobinding, bound(caches)), last)
        # Inputs in host memory are copied to a device when they are bound, not when they are run (onnxruntime issue 5857): each step binds anew, unless all are there.
        if self.reads_device and in_place and all(buffer.device == "cuda" for buffer in caches.past):
            inputs = DeviceFeeds(feeds, {*CONSTANT, "slots", *(value.name for value in self.manifest.encoder)})
            binding = bound(caches, inputs.addresses)

            def fixed() -> None:
                inputs.update()
                session.run_with_iobinding(binding)

            return Step(run, fixed, last)
        return Step(run)

    def _bind(self, caches: BufferedCaches, feeds: Feeds, first: int, rows: int, new: int, addresses: Mapping[str, int] = MappingProxyType({})) -> Any:
        """Bind inputs and states. addresses: of inputs on the device; the others are on the host."""
        binding = self.session.io_binding()
        for name, array in feeds.items():
            device, address = ("cuda", addresses[name]) if name in addresses else ("cpu", array.ctypes.data)
            binding.bind_input(name, device, 0, array.dtype, array.shape, address)
        for state, past, present in zip(self.manifest.states, caches.past, caches.present, strict=True):
            before, after = caches.shapes(state, rows, new)
            offset = 0 if state.update == "append" else first * past.row_bytes
            binding.bind_input(state.past, past.device, 0, past.element, before, past.address + offset)
            binding.bind_output(state.present, present.device, 0, present.element, after, present.address + offset)
        return binding
