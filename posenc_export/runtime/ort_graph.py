"""A graph under ONNX Runtime, and its caches: buffers bound to inputs and outputs by address, on the host or on the device."""

from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

try:
    import onnxruntime
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("runtime: onnxruntime is needed, got none; pip install 'posenc-export[cpu]' or 'posenc-export[gpu]'", name="onnxruntime") from error

from posenc_export.runtime.manifest import Manifest, State
from posenc_export.runtime.onnx_files import check_external, refused
from posenc_export.runtime.rules import check_graph

Feeds = Dict[str, np.ndarray]
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
GROWTH = 256  # slots added at a time to buffers of growing caches


def choose_provider(name: str, manifest: Manifest) -> str:
    """ "cpu" or "cuda"; "auto" is cuda where ONNX Runtime has it and the artefact runs there.

    Raises:
        ValueError: an unknown name, a provider this installation lacks, or one the artefact has no kernels for.
    """
    present = [short for short, long in PROVIDERS.items() if long in onnxruntime.get_available_providers()]
    host_only = manifest.operators.get("GroupQueryAttention", 0) > 0 and manifest.dtype == "float32"
    if name == "auto":
        return "cuda" if "cuda" in present and not host_only else "cpu"
    if name not in PROVIDERS:
        raise ValueError(f"runtime: provider is one of auto, {', '.join(PROVIDERS)}, got {name!r}")
    if name not in present:
        raise ValueError(f"runtime: provider {name} needs an ONNX Runtime that has it, got one with {', '.join(present)}; pip install 'posenc-export[gpu]'")
    if name == "cuda" and host_only:
        raise ValueError(f"runtime: target {manifest.target} in float32 runs on provider cpu, got cuda; export target ort-cuda")
    return name


class OrtGraph:
    """A loaded model.onnx.

    Args:
        path: the file.
        manifest: its description.
        provider: "cpu" or "cuda".
        threads: of one operator; all cores where None.
    """

    def __init__(self, path: Path, manifest: Manifest, provider: str, threads: Optional[int]) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Far keys under ALiBi get shares below 1e-38: as subnormal numbers they would slow the product with the values by 1.7x at 8192.
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        if threads:
            options.intra_op_num_threads = threads
        self.manifest, self.device = manifest, provider
        check_external(path, manifest)
        with refused(path):
            self.session = onnxruntime.InferenceSession(str(path), options, providers=[PROVIDERS[provider]], enable_fallback=0)
            check_graph(manifest, self.session.get_inputs(), self.session.get_outputs())
        if PROVIDERS[provider] not in self.session.get_providers():
            raise ValueError(f"runtime: provider {provider} loads, got {', '.join(self.session.get_providers())}; check the driver and its libraries, or give cpu")

    def open(self, batch: int, capacity: int) -> "OrtCache":
        """Empty caches for `batch` rows."""
        return OrtCache(self, batch, capacity)


class Buffer:
    """Memory for one state, on the host (numpy) or on the device (OrtValue).

    Args:
        shape, dtype, fill: of its content.
        device: "cpu" or "cuda".
    """

    def __init__(self, shape: Sequence[int], dtype: str, fill: int, device: str) -> None:
        self.shape, self.device = tuple(shape), device
        # Zeros cost no memory until they are written: a long range is free until it is used.
        self.array: np.ndarray = np.full(self.shape, fill, dtype) if fill else np.zeros(self.shape, dtype)
        self.address = int(self.array.ctypes.data)
        if device == "cuda":
            self.value = onnxruntime.OrtValue.ortvalue_from_numpy(self.array, "cuda", 0)
            self.address = int(self.value.data_ptr())

    def read(self) -> np.ndarray:
        """The content: a view on the host, a copy from the device."""
        return self.array if self.device == "cpu" else self.value.numpy()  # type: ignore[no-any-return]

    def write(self, content: np.ndarray) -> None:
        """Put content [same shape] in place."""
        if self.device == "cpu":
            self.array[...] = content
        else:
            self.value.update_inplace(np.ascontiguousarray(content))


class OrtCache:
    """The states of one session. `columns` counts the slots in use of growing states.

    States written in place have one buffer; the others have two, the last call's and the next one's, which change places.

    Args:
        graph: what runs on them.
        batch: rows B.
        capacity: slots M of in-place states.
    """

    def __init__(self, graph: OrtGraph, batch: int, capacity: int) -> None:
        self.graph, self.batch, self.capacity, self.columns = graph, batch, capacity, 0
        self.states = graph.manifest.states
        self.grows = any(state.update == "append" for state in self.states)
        self.in_place = all(state.update == "in_place" for state in self.states)
        self.room = GROWTH if self.grows else capacity
        self.past = [self._buffer(state) for state in self.states]
        self.present = [past if state.update == "in_place" else self._buffer(state) for state, past in zip(self.states, self.past, strict=True)]

    def run(self, feeds: Feeds, row: Optional[int] = None) -> np.ndarray:
        """One call on all rows, or on one row of caches that do not grow; output [B or 1,S,*]."""
        binding = self._bind(feeds, row)
        name = self.graph.manifest.outputs[0].name
        binding.bind_output(name, "cpu")
        self.graph.session.run_with_iobinding(binding)
        self._advance(feeds, row)
        return np.array(binding.get_outputs()[len(self.states)].numpy())  # outputs come in the order they were bound

    def stepper(self, feeds: Feeds) -> Callable[[], np.ndarray]:
        """A call of one token per row that reads `feeds` anew each time; its output [B,*] is one buffer, overwritten by the next call."""
        output = self.graph.manifest.outputs[0]
        result = np.zeros([axis if isinstance(axis, int) else size for axis, size in zip(output.axes, (self.batch, 1, 0), strict=True)], output.dtype)
        session, pointer, last = self.graph.session, result.ctypes.data, result[:, 0]

        def bound() -> Any:
            binding = self._bind(feeds, None)
            binding.bind_output(output.name, "cpu", 0, result.dtype, result.shape, pointer)
            return binding

        # For a device, inputs are copied when they are bound, not when they are run (onnxruntime issue 5857): each step binds anew.
        if self.in_place and self.graph.device == "cpu":
            binding, run = bound(), session.run_with_iobinding

            def step() -> np.ndarray:
                run(binding)
                return last

            return step

        def rebind() -> np.ndarray:
            session.run_with_iobinding(bound())
            self._advance(feeds, None)
            return last

        return rebind

    def reserve(self, slots: int) -> bool:
        """Room for `slots` slots in in-place states; True where the buffers moved."""
        if self.grows or slots <= self.capacity:
            return False
        bucket = max(self.graph.manifest.capacity_bucket, 1)
        # No more slots than positions: keys turned when they are read take their rows from a table of that size.
        self.capacity = self.room = min(-(-slots // bucket) * bucket, max(slots, self.graph.manifest.max_positions))
        for index, state in enumerate(self.states):
            if state.update == "in_place":
                self.past[index] = self.present[index] = self._moved(state, self.past[index])
        return True

    def fork(self, slots: int) -> "OrtCache":
        """The same content in memory of its own; where rows stand in place, their first `slots` slots."""
        other = OrtCache(self.graph, self.batch, self.capacity)
        other.columns = self.columns
        if self.grows:
            other._make_room(self.columns)
        for state, mine, its in zip(self.states, self.past, other.past, strict=True):
            if state.update == "append":
                its.write(_resized(mine.read(), its.shape[0]))
            elif state.update == "in_place" and self.graph.manifest.layout == "rows" and mine.device == "cpu":
                valid = (slice(None),) * state.axis + (slice(slots),)
                its.array[valid] = mine.array[valid]
            else:
                its.write(mine.read())
        return other

    def snapshot(self) -> List[np.ndarray]:
        """Copies of the states that every call replaces."""
        return [past.read().copy() for state, past in zip(self.states, self.past, strict=True) if state.update == "replace"]

    def restore(self, snapshot: Sequence[np.ndarray]) -> None:
        """Put back what `snapshot` gave; of nothing, what they were at first."""
        replaced = [(state, past) for state, past in zip(self.states, self.past, strict=True) if state.update == "replace"]
        for index, (state, past) in enumerate(replaced):
            past.write(snapshot[index] if len(snapshot) else np.full(past.shape, state.fill, state.dtype))

    def hide(self, keep: np.ndarray) -> None:
        """Mark slots as never written where keep [B,slots in use] is False."""
        for state, buffer in zip(self.states, self.past, strict=True):
            if state.past == "past_positions":
                slots = keep.shape[1]
                if self.grows:
                    view = buffer.array[: self.batch * self.columns].reshape(self.batch, self.columns)
                    view[:, :slots][~keep] = state.fill
                else:
                    buffer.array[:, :slots][~keep] = state.fill
                    buffer.array[:, slots:] = state.fill

    def trim(self, columns: int) -> None:
        """Drop the columns of growing states from `columns` on."""
        if not self.grows or columns == self.columns:
            return
        for state, buffer in zip(self.states, self.past, strict=True):
            if state.update != "append":
                continue
            shape = self._shape(state, self.columns)
            flat = buffer.read()
            content = flat[: int(np.prod(shape))].reshape(shape)
            kept = np.ascontiguousarray(np.moveaxis(np.moveaxis(content, state.axis, 0)[:columns], 0, state.axis)).reshape(-1)
            buffer.write(_resized(kept, buffer.shape[0]))
        self.columns = columns

    def _bind(self, feeds: Feeds, row: Optional[int]) -> Any:
        binding = self.graph.session.io_binding()
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        new = self._new(feeds)
        if self.grows:
            self._make_room(self.columns + new)
        rows = self.batch if row is None else 1
        for state, past, present in zip(self.states, self.past, self.present, strict=True):
            before = self._shape(state, self.columns if self.grows else self.capacity, rows)
            after = self._shape(state, self.columns + new if self.grows else self.capacity, rows)
            offset = 0 if row is None else row * int(np.prod(before)) * past.array.itemsize
            binding.bind_input(state.past, past.device, 0, past.array.dtype, before, past.address + offset)
            binding.bind_output(state.present, present.device, 0, present.array.dtype, after, present.address + offset)
        return binding

    def _advance(self, feeds: Feeds, row: Optional[int]) -> None:
        if self.grows:
            self.columns += self._new(feeds)
        for index, state in enumerate(self.states):
            if state.update == "replace" and row is not None:  # the other rows have no next one
                past, present = self.past[index], self.present[index]
                content = past.read()
                content[row] = present.read()[row]
                past.write(content)
            elif state.update != "in_place":
                self.past[index], self.present[index] = self.present[index], self.past[index]

    def _new(self, feeds: Feeds) -> int:
        return int(feeds[self.graph.manifest.inputs[0].name].shape[1])

    def _make_room(self, columns: int) -> None:
        if columns <= self.room:
            return
        self.room = max(2 * self.room, -(-columns // GROWTH) * GROWTH)
        for index, state in enumerate(self.states):
            if state.update == "append":
                self.past[index], self.present[index] = self._moved(state, self.past[index]), self._buffer(state)

    def _buffer(self, state: State) -> Buffer:
        shape: List[int] = self._shape(state, self.room)
        # Positions stay on the host: they are small, and a rewind writes them.
        device = "cpu" if state.past == "past_positions" else self.graph.device
        return Buffer([int(np.prod(shape))] if state.update == "append" else shape, state.dtype, state.fill, device)

    def _moved(self, state: State, old: Buffer) -> Buffer:
        buffer = self._buffer(state)
        if state.update == "append":
            buffer.write(_resized(old.read(), buffer.shape[0]))
        else:
            content = buffer.array
            content[tuple(slice(0, size) for size in old.shape)] = old.read()
            buffer.write(content)
        return buffer

    def _shape(self, state: State, slots: int, batch: Optional[int] = None) -> List[int]:
        sizes = [slots if isinstance(axis, str) else axis for axis in state.axes[1:]]
        return [self.batch if batch is None else batch, *sizes]


def _resized(flat: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, flat.dtype)
    count = min(size, len(flat))
    out[:count] = flat[:count]
    return out
