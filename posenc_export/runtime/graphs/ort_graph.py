"""Load model.onnx with ONNX Runtime. Buffers are bound to inputs and outputs by address, on the
host or on the device.
"""

import contextlib
import functools
import platform
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, ContextManager, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

try:
    import onnxruntime
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "runtime: expected onnxruntime, got none; pip install 'posenc-export[cpu]' or "
        "'posenc-export[gpu]'",
        name="onnxruntime",
    ) from error

from posenc_export.runtime.artefact.files import utf8
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import check_graph
from posenc_export.runtime.graphs import cuda, cuda_placement, cuda_steps
from posenc_export.runtime.graphs.cuda_steps import DeviceSteps
from posenc_export.runtime.graphs.onnx_files import check_external, load_errors, refused
from posenc_export.runtime.session import device_memory
from posenc_export.runtime.session.caches import Bound, Call, Feeds
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError

# SkipLayerNormalization takes 1.7 to 7 times as long on a CPU as the Add and LayerNormalization
# that it replaces (ONNX Runtime 1.31, widths 256 to 1536).
SLOWER = {"cpu": ["SkipLayerNormFusion"], "cuda": [], "webgpu": []}
# For DequantizeLinear before MatMul: 4-bit products that do not round activations. For 8 bits they
# are slow, and weights are dequantized when they are loaded instead.
FOUR_BITS, EIGHT_BITS = (
    {"session.qdq_matmulnbits_accuracy_level": "0"},
    {"session.disable_quant_qdq": "1"},
)
FLOAT_ACTIVATIONS = {
    "int4": FOUR_BITS,
    "int4-128": FOUR_BITS,
    "int8": EIGHT_BITS,
    "int8-32": EIGHT_BITS,
    "keep": EIGHT_BITS,
    "mixed": EIGHT_BITS,
}
FOLDER = "session.model_external_initializers_file_folder_path"  # for models that are no file
HOST_ONLY = {
    "GroupQueryAttention",
    "MoE",
    "QMoE",
}  # operators of target ort that have no float32 kernel for CUDA, or one with other rules
PROVIDERS = {
    "cpu": ("CPUExecutionProvider", {}),
    "cuda": (cuda.NAME, cuda.OPTIONS),
    "webgpu": ("WebGpuExecutionProvider", {}),
}
INSTALL_WEBGPU = "pip install onnxruntime-webgpu in an environment without onnxruntime"


def choose_provider(name: str, manifest: Manifest) -> str:
    """Return the provider for an artefact: "cpu", "cuda" or "webgpu". "auto" chooses cuda if this
    ONNX Runtime is built with it and both machine and artefact can run it. The first artefact that
    the machine cannot run on cuda, although ONNX Runtime is built with it, causes a warning that
    says why.

    Raises:
        ValueError: the machine lacks what the provider needs, or the artefact has operators or a
            dtype without kernels for it.
    """
    present = onnxruntime.get_available_providers()
    host_only = _host_only(manifest)
    if name == "cpu" or (name == "auto" and (host_only or cuda.NAME not in present)):
        if manifest.dtype == "bfloat16":
            raise ValueError(
                "runtime: expected provider cuda for an artefact in bfloat16, got cpu; load "
                "it on a machine that runs cuda, or export dtype float16"
            )
        return "cpu"
    if name == "webgpu":
        if PROVIDERS[name][0] not in present:
            raise ValueError(
                f"runtime: expected an ONNX Runtime with provider {name}, got one with "
                f"{', '.join(present)}; {INSTALL_WEBGPU}"
            )
        return name
    if host_only:
        raise ValueError(
            f"runtime: expected provider cpu for {host_only}, got {name}; export target "
            "onnx-static, or ort-cuda for half precision"
        )
    missing = cuda.obstacle() or cuda.cudnn_obstacle(manifest)
    if missing is None:
        return "cuda"
    if name == "cuda" or manifest.dtype == "bfloat16":
        raise ValueError(
            f"runtime: expected a machine that can run provider cuda, got {missing.found}; "
            f"{missing.remedy}"
        )
    _warn_once(
        "runtime: provider auto chose cpu, because provider cuda cannot run here: got "
        f"{missing.found}; {missing.remedy}"
    )
    return "cpu"


def _host_only(manifest: Manifest) -> str:
    """Return what of an artefact runs on the CPU only; empty for nothing. CUDA's kernels for
    weights of few bits refuse token tables, and are wrong for encoders.
    """
    if manifest.weights is not None:
        return f"weights in {manifest.weights.format}"
    needs = manifest.dtype == "float32" and not HOST_ONLY.isdisjoint(manifest.operators)
    return f"target {manifest.target} in float32" if needs else ""


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)  # at the call of `load`


def _saturates() -> bool:
    """Whether products of unsigned and signed bytes may saturate: on x86 CPUs without VNNI. True
    on x86 if the CPU's features are not known.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        return "vnni" not in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


def session_options(manifest: Manifest, threads: Optional[int]) -> Any:
    """Return the options with which ONNX Runtime runs an artefact. threads: per operator; None
    uses all cores.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Under ALiBi, attention weights of distant keys are below 1e-38. As subnormal numbers they slow
    # the product with the values by 1.7x at 8192 keys.
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    if manifest.operators.get("MatMulIntegerToFloat") and _saturates():
        options.add_session_config_entry(
            "session.x64quantprecision", "1"
        )  # uses products of unsigned bytes, which are exact but slower
    if manifest.weights is not None and manifest.weights.activations == "float32":
        for name, value in FLOAT_ACTIVATIONS[manifest.weights.format].items():
            options.add_session_config_entry(name, value)
    if threads:
        options.intra_op_num_threads = threads
    return options


class OrtGraph:
    """A loaded model.onnx (runtime.session.caches.Graph).

    Args:
        path: the file model.onnx.
        manifest: description of the graph.
        provider: "cpu" or "cuda".
        threads: threads per operator; None uses all cores.
        capture: whether steps on CUDA are captured as CUDA graphs, if the graph allows it.
        content: serialised model to open in place of the file, with the external data of its
            folder.
    """

    strided = False

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        provider: str,
        threads: Optional[int],
        capture: bool = True,
        content: bytes = b"",
    ) -> None:
        options = session_options(manifest, threads)
        self.manifest, self.provider = manifest, provider
        self.device = (
            "cuda" if provider == "cuda" else "cpu"
        )  # WebGPU: the Python binding cannot allocate on the device, so caches stay on the host
        check_external(path, manifest)
        placement = cuda_placement.placed(path) if self.device == "cuda" else None
        # Whether the graph reads no input both on the host and on the device, to which it would
        # copy it from memory that is bound once.
        self.reads_device = placement is not None and not placement.copies["to the device"]
        captures = capture and placement is not None and placement.captured and _repeats(manifest)
        self._turn: ContextManager[Any] = (
            device_memory.TURN if self.device == "cuda" else contextlib.nullcontext()
        )
        with self._turn, refused(path):
            if content:
                options.add_session_config_entry(FOLDER, utf8(path.parent))
            opened = content or utf8(path)
            self.session, captures = _opened(opened, options, provider, captures)
            check_graph(manifest, self.session.get_inputs(), self.session.get_outputs())
        self.steps = DeviceSteps(self.session, captures)

    def run(self, call: Call, states: Sequence[Bound]) -> np.ndarray:
        with self._turn:
            encoder = self._encoder(call.feeds)
            kept = {name: self.steps.copies.address(array) for name, array in encoder.items()}
            binding = self._bind(call.feeds, states, kept)
            binding.bind_output(self.manifest.outputs[call.output].name, "cpu")
            try:
                self.session.run_with_iobinding(binding, self.steps.uncaptured)
            except RUN_ERRORS as error:
                raise GraphError(error) from None
            # Outputs come in the order in which they were bound.
            return np.array(binding.get_outputs()[len(states)].numpy())

    def repeat(
        self, feeds: Feeds, states: Sequence[Bound], result: np.ndarray
    ) -> Callable[[], object]:
        output = self.manifest.outputs[0].name
        # Inputs in host memory are copied to a device when they are bound, not when they are run
        # (onnxruntime issue 5857): each step binds anew, unless all are there.
        if (
            self.reads_device
            and all(bound.past.device == "cuda" for bound in states)
            and not any(bound.state.grows for bound in states)
        ):
            return self._device_step(feeds, states, result)
        session, uncaptured, turn = self.session, self.steps.uncaptured, self._turn

        def binding() -> Any:
            binding = self._bind(feeds, states)
            binding.bind_output(output, "cpu", 0, result.dtype, result.shape, result.ctypes.data)
            return binding

        def run() -> None:
            with turn:
                session.run_with_iobinding(binding(), uncaptured)

        if self.provider == "cpu":
            return functools.partial(session.run_with_iobinding, binding())
        return run

    def _device_step(
        self, feeds: Feeds, states: Sequence[Bound], result: np.ndarray
    ) -> Callable[[], object]:
        """Prepare steps whose inputs, states and output [B,S,*] are on the device."""
        output = self.manifest.outputs[0].name

        def bound(addresses: Mapping[str, int], pointer: int) -> Any:
            binding = self._bind(feeds, states, addresses)
            binding.bind_output(output, "cuda", 0, result.dtype, result.shape, pointer)
            return binding

        with self._turn:
            places = [(*bound.addresses, bound.before) for bound in states]
            return self.steps.prepare(feeds, self._encoder(feeds), result, places, bound)

    def _encoder(self, feeds: Feeds) -> Feeds:
        """Return the graph inputs that the session's encoder gave, if they can stay on the
        device.
        """
        return (
            {value.name: feeds[value.name] for value in self.manifest.encoder}
            if self.reads_device
            else {}
        )

    def _bind(
        self,
        feeds: Feeds,
        states: Sequence[Bound],
        addresses: Mapping[str, int] = MappingProxyType({}),
    ) -> Any:
        """Bind inputs and states. addresses: of inputs on the device; the others are on the
        host.
        """
        binding = self.session.io_binding()
        for name, array in feeds.items():
            device, address = (
                ("cuda", addresses[name]) if name in addresses else ("cpu", array.ctypes.data)
            )
            binding.bind_input(name, device, 0, array.dtype, array.shape, address)
        for bound in states:
            (read, written), past, present = bound.addresses, bound.past, bound.present
            name = bound.state.past
            binding.bind_input(name, past.device, 0, past.element, bound.before, read)
            name = bound.state.present
            binding.bind_output(name, present.device, 0, present.element, bound.after, written)
        return binding


def _opened(
    model: Union[str, bytes], options: Any, provider: str, captures: bool
) -> Tuple[Any, bool]:
    """Open a session on a file or a serialised model.

    Return it, and whether it captures CUDA graphs, which versions of ONNX Runtime may refuse other
    than the one that the table of kernels is of.
    """
    name, given = PROVIDERS[provider]
    providers = [(name, {**given, "enable_cuda_graph": "1"} if captures else given)]
    try:
        return onnxruntime.InferenceSession(
            model,
            options,
            providers=providers,
            enable_fallback=0,
            disabled_optimizers=SLOWER[provider],
        ), captures
    except load_errors() as error:
        if not captures:
            raise
        cuda_steps.warn_uncaptured(error)
        return _opened(model, options, provider, captures=False)


def _repeats(manifest: Manifest) -> bool:
    """Whether the steps of a session have the same shapes, with all states in device memory."""
    fixed = all(not state.grows and not state.holds_positions for state in manifest.states)
    return bool(manifest.states) and fixed and manifest.signature != "mask"
