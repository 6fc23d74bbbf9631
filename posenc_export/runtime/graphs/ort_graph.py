"""Load model.onnx with ONNX Runtime, and bind buffers by address on host or device."""

import contextlib
import functools
from pathlib import Path
from types import MappingProxyType
from typing import Any, ContextManager, Mapping

try:
    import onnxruntime
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "runtime: expected onnxruntime, got none; pip install 'posenc-export[cpu]', or "
        "'posenc-export[gpu]' for CUDA",
        name="onnxruntime",
    ) from error

from posenc_export.runtime.artefact import files, rules
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import cuda_placement, cuda_steps
from posenc_export.runtime.graphs.onnx_files import FOLDER, check_external, load_errors, refused
from posenc_export.runtime.graphs.ort_options import CRASHES, PROVIDERS, SLOWER, session_options
from posenc_export.runtime.session import buffers
from posenc_export.runtime.session.caches import BoundRun, Feeds, RunMemory

NONE: Mapping[str, int] = MappingProxyType({})


class OrtGraph:
    """A loaded model.onnx (runtime.session.caches.Graph). threads: per operator; None uses all
    cores.

    Args:
        capture: whether steps on CUDA are captured as CUDA graphs, if the graph allows it.
        content: serialised model to open in place of the file, with the external data of its
            folder.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        provider: str,
        threads: int | None,
        capture: bool = True,
        content: bytes = b"",
    ) -> None:
        options = session_options(manifest, threads)
        self.manifest, self.provider = manifest, provider
        self.device = "cuda" if provider == "cuda" else "cpu"
        check_external(path, manifest)
        placement = cuda_placement.placed(path) if self.device == "cuda" else None
        # Whether steps may bind inputs on the device. Not if an input is also read on the host: it
        # would be copied to the device when it is bound, and not again in later steps.
        self.reads_device = placement is not None and not placement.to_device
        # Steps repeat if their shapes stay the same, with all states in device memory.
        fixed = all(not state.grows and not state.holds_positions for state in manifest.states)
        repeats = bool(manifest.states) and fixed and manifest.signature != "mask"
        captures = capture and repeats and placement is not None and placement.captured
        cuda = self.device == "cuda"
        self._lock: ContextManager[Any] = buffers.DEVICE_LOCK if cuda else contextlib.nullcontext()
        with self._lock, refused(path):
            if content:
                options.add_session_config_entry(FOLDER, files.utf8(path.parent))
            opened = content or files.utf8(path)
            disabled = [*SLOWER[provider], *CRASHES.get(manifest.dtype, ())]
            session, captures = _opened(opened, options, provider, disabled, captures)
            rules.check_graph(manifest, session.get_inputs(), session.get_outputs())
        self.ort_session, self.steps = session, cuda_steps.DeviceSteps(session, captures)

    def bind(self, feeds: Feeds, states: RunMemory, outputs: Feeds, once: bool = False) -> BoundRun:
        # Inputs in host memory are copied to a device when they are bound, not when they are run
        # (onnxruntime issue 5857): each step binds anew, unless all are there.
        on_device = self.reads_device and all(memory.past.device == "cuda" for memory in states)
        if on_device and not once and not any(memory.state.grows for memory in states):
            return self._device_step(feeds, states, outputs)
        session, uncaptured, lock = self.ort_session, self.steps.uncaptured, self._lock

        def binding() -> Any:
            kept = {}
            if self.reads_device:
                encoder = self._encoder(feeds).items()
                kept = {name: self.steps.copies.address(array) for name, array in encoder}
            first = outputs.keys() == {self.manifest.outputs[0].name}  # as in other runs
            binding = self._bind(feeds, states, kept, once and first and self.provider == "cpu")
            for name, array in outputs.items():
                binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            return binding

        def run() -> None:
            with lock:
                session.run_with_iobinding(binding(), uncaptured)

        if self.provider == "cpu":  # without checks, which take 1 us in Python
            return functools.partial(session._sess.run_with_iobinding, binding()._iobinding, None)
        return run

    def _device_step(self, feeds: Feeds, states: RunMemory, outputs: Feeds) -> BoundRun:
        ((output, result),) = outputs.items()

        def bind(addresses: Mapping[str, int], pointer: int) -> Any:
            binding = self._bind(feeds, states, addresses)
            binding.bind_output(output, "cuda", 0, result.dtype, result.shape, pointer)
            return binding

        with self._lock:
            places = [(m.past.address, m.present.address, m.first, m.before) for m in states]
            return self.steps.prepare(feeds, self._encoder(feeds), result, places, bind)

    def _encoder(self, feeds: Feeds) -> Feeds:
        """Return the inputs that the session's encoder gave, which can stay on the device."""
        return {value.name: feeds[value.name] for value in self.manifest.encoder}

    def _bind(
        self,
        feeds: Feeds,
        states: RunMemory,
        addresses: Mapping[str, int] = NONE,
        reuse: bool = False,
    ) -> Any:
        """Bind inputs and states; inputs with `addresses` are on the device. reuse: bind inputs to
        the binding that is kept with the states, which then serves one run.
        """
        binding = states.bound if reuse else None
        if binding is None:
            binding = self.ort_session.io_binding()
            for memory in states:
                name, buffer = memory.state.past, memory.past
                address = buffer.address + memory.first * buffer.row_bytes
                binding.bind_input(name, buffer.device, 0, buffer.element, memory.before, address)
                name, buffer = memory.state.present, memory.present
                address = buffer.address + memory.first * buffer.row_bytes
                binding.bind_output(name, buffer.device, 0, buffer.element, memory.after, address)
            states.bound = binding if reuse else states.bound
        for name, array in feeds.items():
            device = "cuda" if name in addresses else "cpu"
            address = addresses.get(name, array.ctypes.data)
            binding.bind_input(name, device, 0, array.dtype, array.shape, address)
        return binding


def _opened(
    model: Any, options: Any, provider: str, disabled: list[str], captures: bool
) -> tuple[Any, bool]:
    """Open a session on a file or a serialised model. Return it, and whether it captures CUDA
    graphs. If ONNX Runtime refuses to capture them, as it may if cuda_kernels.json was made for
    another version, the session is opened without.
    """
    name, settings = PROVIDERS[provider]
    settings = {**settings, "enable_cuda_graph": "1"} if captures else settings
    try:
        session = onnxruntime.InferenceSession(
            model, options, [(name, settings)], enable_fallback=0, disabled_optimizers=disabled
        )
    except load_errors() as error:
        if not captures:
            raise
        cuda_steps.warn_uncaptured(error)
        return _opened(model, options, provider, disabled, captures=False)
    return session, captures
