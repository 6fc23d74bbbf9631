"""Memory of the states of a session. On the host, all of it is taken at once, or each page when it
is written. On the device, the CUDA runtime that ONNX Runtime has loaded copies it.
"""

import contextlib
import ctypes
import functools
import math
import mmap
import sys
import threading
from typing import Any, Callable, Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import State

Slots = slice | np.ndarray
Place = tuple[int, int]  # row and slot
# Dtypes that numpy lacks: dtype of the same size that holds their bits, and TensorProto.DataType.
ELEMENTS = {"bfloat16": ("uint16", 16)}
DEVICE_TO_HOST, DEVICE_TO_DEVICE = 2, 3  # cudaMemcpyKind
# Held by calls that use the device: while one thread captures a CUDA graph, others must not
# allocate memory or wait.
DEVICE_LOCK = threading.RLock()
CAN_RESERVE = sys.platform == "linux"
# Flags of Linux. Python 3.11 has no name for the last one, with which the system does not compare
# the size with its memory (linux/mman.h).
SHARED_WITH_NONE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | 0x4000


class Buffer:
    """Memory of one state, on the host (numpy) or on the device "cuda" (OrtValue), there filled
    with 0. Raises MemoryError if there is none.

    Args:
        reserved: whether memory on the host, filled with 0, is taken only where it is written.

    Attributes:
        axis: that of slots.
        array: the memory on the host; empty for a buffer on the device.
        mapping: the mapping of a reserved buffer, otherwise None.
    """

    def __init__(
        self, shape: Sequence[int], state: State, device: str, reserved: bool = False
    ) -> None:
        dtype, element = ELEMENTS.get(state.dtype, (state.dtype, 0))
        self.shape, self.device, self.dtype = tuple(shape), device, np.dtype(dtype)
        self.fill, self.axis = state.fill, state.axis or 1
        self.element: Any = element or self.dtype
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self.array, self.mapping = np.zeros(0, dtype), None
        if reserved:
            self.array, self.mapping = reserved_memory(self.shape, self.dtype)
        elif device == "cpu":
            self.array = np.full(shape, self.fill, dtype) if self.fill else np.zeros(shape, dtype)
        self.address = int(self.array.ctypes.data)
        if device == "cuda":
            import onnxruntime

            # The graph is given the address of this memory, and the element type when it is bound.
            allocate = onnxruntime.OrtValue.ortvalue_from_shape_and_type
            with DEVICE_LOCK:
                self.value: Any = allocate(self.shape, self.dtype, "cuda", 0)
            self.address = int(self.value.data_ptr())
            if self.bytes:
                clear(self.address, self.bytes, self.bytes, 1)

    @property
    def bytes(self) -> int:
        """Bytes of the content."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Return the content: a view of host memory, or a copy of device memory."""
        if self.device == "cpu":
            return self.array
        with DEVICE_LOCK:
            return self.value.numpy()

    def write(self, part: tuple[Any, ...], content: Any) -> None:
        """Overwrite a part of the content, by its index, with an array or a number."""
        if self.device == "cpu":
            self.array[part] = content
            return
        with DEVICE_LOCK:
            whole = self.value.numpy()
            whole[part] = content
            self.value.update_inplace(np.ascontiguousarray(whole))

    def copy_rows(self, row: int, source: "Buffer", first: int, rows: int) -> None:
        """Copy `rows` rows of `source`, from row `first` on, to this buffer from row `row` on."""
        if self.device == "cpu":
            self.array[row : row + rows] = source.array[first : first + rows]
        elif rows:
            size, origin = rows * self.row_bytes, source.address + first * self.row_bytes
            copy(self.address + row * self.row_bytes, size, origin, size, size, 1)

    def part(self, row: int, slots: Slots) -> tuple[Any, ...]:
        """Return the index of some slots of a row."""
        return (row, *[slice(None)] * (self.axis - 1), slots)

    def copy_slots(self, to: Place, source: "Buffer", at: Place, slots: int) -> None:
        """Copy slots of a row of `source`, from row and slot `at` on, to row and slot `to` of this
        buffer. Other sizes are equal.
        """
        (row, begin), (first, slot) = to, at
        if self.device == "cpu":
            origin = source.array[source.part(first, slice(slot, slot + slots))]
            self.array[self.part(row, slice(begin, begin + slots))] = origin
        elif slots:
            address, pitch, width, height = self._pieces(row, slots, begin)
            source_address, source_pitch, *_ = source._pieces(first, slots, slot)
            copy(address, pitch, source_address, source_pitch, width, height)

    def clear(self, row: int, slots: Slots = slice(None)) -> None:
        """Write the initial value to some slots of a row."""
        index = self.part(row, slots)
        if self.device == "cpu":
            self.array[index] = self.fill
        elif isinstance(slots, slice):
            start, stop, _ = slots.indices(self.shape[self.axis])
            address, pitch, width, height = self._pieces(row, max(stop - start, 0), start)
            if width:
                clear(address, pitch, width, height)
        else:
            self.write(index, self.fill)

    def release(self, row: int, begin: int) -> None:
        """Give the memory of slots of a row from `begin` on back to the system, in whole pages. Its
        content becomes zeros. Only for reserved buffers.
        """
        assert self.mapping is not None
        address, pitch, width, height = self._pieces(row, self.shape[self.axis] - begin, begin)
        page = mmap.PAGESIZE
        for piece in range(address - self.address, address - self.address + height * pitch, pitch):
            first, last = -(-piece // page) * page, (piece + width) // page * page
            if first < last:
                self.mapping.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _pieces(self, row: int, slots: int, begin: int) -> tuple[int, ...]:
        """Return address of the first piece of some slots of a row, bytes between pieces, bytes and
        number of pieces.
        """
        slot = math.prod(self.shape[self.axis + 1 :]) * self.dtype.itemsize
        return (
            self.address + row * self.row_bytes + begin * slot,
            self.shape[self.axis] * slot,
            slots * slot,
            math.prod(self.shape[1 : self.axis]),
        )


def reserved_memory(shape: Sequence[int], dtype: np.dtype) -> tuple[np.ndarray, mmap.mmap]:
    """Return an array of zeros, and the mapping in which it lies. Raise MemoryError if the system
    has no addresses for it.
    """
    try:
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=SHARED_WITH_NONE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"expected addresses for an array of {list(shape)}: {error}") from None
    with contextlib.suppress(OSError):  # of a system without large pages
        # Large pages would take memory for slots that are never written.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape), memory


def copy(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int
) -> None:
    """Copy `height` pieces of `width` bytes between addresses; a piece begins `pitch` bytes after
    the one before it. Raise RuntimeError for an error of CUDA.
    """
    to = ctypes.c_void_p(target), ctypes.c_size_t(target_pitch)
    origin = ctypes.c_void_p(source), ctypes.c_size_t(source_pitch)
    sizes = ctypes.c_size_t(width), ctypes.c_size_t(height)
    _call("cudaMemcpy2D", *to, *origin, *sizes, DEVICE_TO_DEVICE)


def clear(address: int, pitch: int, width: int, height: int) -> None:
    """Set `height` pieces of `width` bytes to 0. Raise RuntimeError for an error of CUDA."""
    size = ctypes.c_size_t
    _call("cudaMemset2D", ctypes.c_void_p(address), size(pitch), 0, size(width), size(height))


def to_host(array: np.ndarray, source: int) -> Callable[[], None]:
    """Return a function that copies the content of an array, which must live as long, from an
    address on the device. It raises RuntimeError for an error of CUDA.
    """
    to, origin = ctypes.c_void_p(array.ctypes.data), ctypes.c_void_p(source)
    size = ctypes.c_size_t(array.nbytes)
    # To memory of the host that is not pinned, it returns when the copy is complete.
    copy = _runtime().cudaMemcpy

    def fetch() -> None:
        _check("cudaMemcpy", copy(to, origin, size, DEVICE_TO_HOST))

    return fetch


def _call(name: str, *arguments: Any) -> None:
    """Call a function and wait: ONNX Runtime's stream does not wait for the one it runs on."""
    with DEVICE_LOCK:
        runtime = _runtime()
        _check(name, getattr(runtime, name)(*arguments) or runtime.cudaStreamSynchronize(None))


def _check(name: str, error: int) -> None:
    if error:
        raise RuntimeError(f"session: expected {name} to succeed, got CUDA error {error}")


@functools.cache
def _runtime() -> Any:
    import onnxruntime

    major = onnxruntime.cuda_version.partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")
