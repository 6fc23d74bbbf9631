"""Steps on CUDA, with all in device memory, so that a step binds nothing and can be replayed.

ONNX Runtime captures a step under an id, and replays it with the addresses and shapes of that run,
whatever is bound later. It captures in global mode: meanwhile, other threads must not allocate
memory or wait for the device. Each thread has its own graphs.
"""

import warnings
import weakref
from typing import Any, Callable, Hashable, Mapping, NamedTuple, Sequence

import numpy as np
import onnxruntime

from posenc_export.runtime.graphs import cuda
from posenc_export.runtime.session import buffers, errors
from posenc_export.runtime.session.caches import Feeds, Shape

ON_HOST = "total_sequence_length"  # GroupQueryAttention reads it in host memory
ALIGNMENT = 256  # bytes, as cudaMalloc aligns memory
UNCAPTURED = -1  # gpu_graph_id of runs that are not captured
MOST_GRAPHS = 64  # of a loaded graph: ONNX Runtime 1.31 does not release graphs of CUDA

Launch = Callable[[], None]


class DeviceCopies:
    """Copies on the device of arrays that do not change, each kept as long as its array."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}

    def address(self, array: np.ndarray) -> int:
        """Return the address on the device of an array that is contiguous in its base."""
        block, copies = array if array.base is None else array.base, self._copies
        name = id(block)
        if name not in copies:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(block, "cuda", 0)
            copies[name] = (weakref.ref(block, lambda _: copies.pop(name, None)), value)
        return int(copies[name][1].data_ptr()) + int(array.ctypes.data) - int(block.ctypes.data)


class StepMemory(NamedTuple):
    """Device memory of the inputs and the output of steps of one number of rows and tokens."""

    staged: np.ndarray  # the content of `inputs` on the host
    inputs: Any
    output: Any


class DeviceSteps:
    """Prepares the steps of a session of ONNX Runtime. captures: whether it has CUDA graphs."""

    def __init__(self, session: Any, captures: bool) -> None:
        self.session, self.copies = session, DeviceCopies()
        self.most = MOST_GRAPHS if captures else 0  # captured steps
        self.uncaptured = _options(UNCAPTURED) if captures else None
        self._memories: dict[Shape, StepMemory] = {}
        self._slots: dict[int, np.ndarray] = {}
        self._ids: dict[Hashable, int] = {}

    def prepare(
        self,
        feeds: Feeds,
        constant: Mapping[str, np.ndarray],
        result: np.ndarray,
        states: Sequence[Any],
        bind: Callable[[Mapping[str, int], int], Any],
    ) -> Launch:
        """Return a function that runs a step on the current content of feeds.

        Args:
            constant: inputs of the session's encoder, which no call changes.
            result: array [B,S,*] that each run writes. Only steps of one token are captured.
            states: addresses and shapes of the states, which are on the device.
            bind: returns a binding for addresses on the device of inputs and of the output.
        """
        unchanged = dict(constant)
        if "slots" in feeds:  # 0, 1, ... T-1, whatever the session
            unchanged["slots"] = self._slots.setdefault(len(feeds["slots"]), feeds["slots"])
        changing = {n: array for n, array in feeds.items() if n not in (*unchanged, ON_HOST)}
        addresses, update, pointer = self._staged(changing, result)
        addresses |= {name: self.copies.address(array) for name, array in unchanged.items()}
        shapes = tuple((name, addresses.get(name), array.shape) for name, array in feeds.items())
        # A replay takes the number of the run that was captured
        total = int(feeds[ON_HOST]) if ON_HOST in feeds else 0
        fetch = buffers.to_host(result, pointer)
        key = (shapes, total, tuple(states))
        number = self.id_of(key) if result.shape[1] == 1 else UNCAPTURED
        return self._launch(bind(addresses, pointer), number, update, fetch)

    def id_of(self, bound: Hashable) -> int:
        """Return the id of a step with these addresses and shapes; UNCAPTURED if none is left."""
        if bound not in self._ids and len(self._ids) < self.most:
            self._ids[bound] = len(self._ids) + 1
        return self._ids.get(bound, UNCAPTURED)

    def _staged(self, feeds: Feeds, result: np.ndarray) -> tuple[dict[str, int], Launch, int]:
        """Return the addresses of inputs and of the output on the device, and a function that
        copies the inputs there, together, since each copy waits.
        """
        places, size = [], 0
        for array in feeds.values():
            places.append(slice(size, size + array.nbytes))
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        sizes = result.shape[:2]
        if sizes not in self._memories or self._memories[sizes].staged.size != size:
            staged = np.zeros(size, np.uint8)
            on_device = onnxruntime.OrtValue.ortvalue_from_numpy
            values = [on_device(array, "cuda", 0) for array in (staged, result)]
            self._memories[sizes] = StepMemory(staged, *values)
        memory, first = self._memories[sizes], int(self._memories[sizes].inputs.data_ptr())
        pairs = [
            (memory.staged[place].view(array.dtype).reshape(array.shape), array)
            for place, array in zip(places, feeds.values(), strict=True)
        ]

        def update() -> None:
            for staged, array in pairs:
                staged[...] = array
            memory.inputs.update_inplace(memory.staged)

        addresses = {name: first + at.start for name, at in zip(feeds, places, strict=True)}
        return addresses, update, int(memory.output.data_ptr())

    def _launch(self, binding: Any, number: int, update: Launch, fetch: Launch) -> Launch:
        """Return a function that copies inputs, runs or replays a graph, and copies its output."""
        run, uncaptured = self.session.run_with_iobinding, self.uncaptured
        options = uncaptured if number == UNCAPTURED else _options(number)

        def launch() -> None:
            nonlocal options
            with buffers.DEVICE_LOCK:
                update()
                try:
                    run(binding, options)
                except errors.RUN_ERRORS as error:
                    if options is uncaptured:
                        raise
                    if self.most:
                        warn_uncaptured(error)
                    self.most, self._ids, options = 0, {}, uncaptured
                    run(binding, options)  # a step may be repeated: it writes the same slots
                fetch()

        return launch


def warn_uncaptured(error: BaseException) -> None:
    """Warn that steps are not captured as CUDA graphs, and why."""
    match = cuda.FAILURE.search(str(error))
    said = match[0] if match else " ".join(str(error).split())[:200]
    remedy = "steps run without it; give load capture=False to do so from the start"
    rule = "runtime: expected steps that can be captured as a CUDA graph"
    warnings.warn(f"{rule}, got {said}; {remedy}", RuntimeWarning, stacklevel=5)


def _options(number: int) -> Any:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options
