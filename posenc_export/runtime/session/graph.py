"""What a session needs of a loaded graph: its runs, and the memory that they read and write."""

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Protocol, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, State
from posenc_export.runtime.session import device_memory, reserved_memory

Slots = Union[slice, np.ndarray]
Place = Tuple[int, int]  # row and slot
# Dtypes that numpy lacks: dtype of the same size that holds their bits, and TensorProto.DataType.
ELEMENTS = {"bfloat16": ("uint16", 16)}
Feeds = Dict[str, np.ndarray]  # graph inputs of a run by name, without the caches
Shape = Tuple[int, ...]
BoundRun = Callable[[], object]


class Buffer:
    """Memory of one state, on the host (numpy) or on the device "cuda" (OrtValue), there filled
    with 0. Raises MemoryError if there is none.

    Args:
        reserved: whether memory on the host, filled with 0, is taken only where it is written.

    Attributes:
        array: the memory on the host; empty for a buffer on the device.
        mapping: the mapping of a reserved buffer, otherwise None.
    """

    def __init__(
        self, shape: Sequence[int], dtype: str, fill: int, device: str, reserved: bool = False
    ) -> None:
        dtype, element = ELEMENTS.get(dtype, (dtype, 0))
        self.shape, self.device, self.fill, self.dtype = tuple(shape), device, fill, np.dtype(dtype)
        self.element: Any = element or self.dtype
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self.array, self.mapping = np.zeros(0, dtype), None
        if reserved:
            self.array, self.mapping = reserved_memory.reserved(self.shape, self.dtype)
        elif device == "cpu":
            self.array = np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype)
        self.address = int(self.array.ctypes.data)
        if device == "cuda":
            import onnxruntime

            # The graph is given the address of this memory, and the element type when it is bound.
            allocate = onnxruntime.OrtValue.ortvalue_from_shape_and_type
            with device_memory.TURN:
                self.value: Any = allocate(self.shape, self.dtype, "cuda", 0)
            self.address = int(self.value.data_ptr())
            if self.bytes:
                device_memory.clear(self.address, self.bytes, self.bytes, 1)

    @property
    def bytes(self) -> int:
        """Bytes of the content."""
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def element_bytes(dtype: str) -> int:
        """Return the bytes of a number of a dtype."""
        return np.dtype(ELEMENTS.get(dtype, (dtype, 0))[0]).itemsize

    def read(self) -> np.ndarray:
        """Return the content: a view of host memory, or a copy of device memory."""
        if self.device == "cpu":
            return self.array
        with device_memory.TURN:
            return self.value.numpy()

    def write(self, content: np.ndarray) -> None:
        """Overwrite the content with an array of the same shape."""
        if self.device == "cpu":
            if content is not self.array:
                self.array[...] = content
        else:
            with device_memory.TURN:
                self.value.update_inplace(np.ascontiguousarray(content))

    def copy_rows(self, row: int, source: "Buffer", first: int, rows: int) -> None:
        """Copy `rows` rows of `source`, from row `first` on, to this buffer from row `row` on."""
        if self.device == "cpu":
            self.array[row : row + rows] = source.array[first : first + rows]
        elif rows:
            size, origin = rows * self.row_bytes, source.address + first * self.row_bytes
            device_memory.copy(self.address + row * self.row_bytes, size, origin, size, size, 1)

    def copy_slots(self, to: Place, source: "Buffer", at: Place, axis: int, slots: int) -> None:
        """Copy `slots` slots along an axis of a row of `source`, from row and slot `at` on, to row
        and slot `to` of this buffer. Other sizes are equal.
        """
        (row, begin), (first, slot) = to, at
        if self.device == "cpu":
            origin = source.array[part_of(first, axis, slice(slot, slot + slots))]
            self.array[part_of(row, axis, slice(begin, begin + slots))] = origin
        elif slots:
            address, pitch, width, height = self._pieces(row, axis, slots, begin)
            source_address, source_pitch, *_ = source._pieces(first, axis, slots, slot)
            device_memory.copy(address, pitch, source_address, source_pitch, width, height)

    def clear_slots(self, row: int, axis: int, slots: Slots) -> None:
        """Write the initial value to some slots along an axis of one row."""
        index = part_of(row, axis, slots)
        if self.device == "cpu":
            self.array[index] = self.fill
        elif isinstance(slots, slice):
            start, stop, _ = slots.indices(self.shape[axis])
            address, pitch, width, height = self._pieces(row, axis, max(stop - start, 0), start)
            if width:
                device_memory.clear(address, pitch, width, height)
        else:
            content = self.read()
            content[index] = self.fill
            self.write(content)

    def release(self, row: int, axis: int, begin: int) -> None:
        """Give the memory of slots of a row from `begin` on back to the system; in reserved buffers
        only.
        """
        assert self.mapping is not None
        address, pitch, width, height = self._pieces(row, axis, self.shape[axis] - begin, begin)
        for piece in range(height):
            first = address - self.address + piece * pitch
            reserved_memory.release(self.mapping, first, first + width)

    def _pieces(self, row: int, axis: int, slots: int, begin: int) -> Tuple[int, ...]:
        """Return address of the first piece of some slots of a row, bytes between pieces, bytes and
        number of pieces.
        """
        slot = math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize
        return (
            self.address + row * self.row_bytes + begin * slot,
            self.shape[axis] * slot,
            slots * slot,
            math.prod(self.shape[1:axis]),
        )


class GraphRun(NamedTuple):
    """One run of the graph on consecutive rows."""

    first: int  # index of the first row
    rows: int  # number of rows
    new: int  # number of columns S; runs for single rows may differ in it
    feeds: Feeds
    output: int = 0  # index of the output to return, in Manifest.outputs
    result: Optional[np.ndarray] = None  # memory [rows,S,*] that the graph may write the output to


class StateMemory(NamedTuple):
    """The memory of a state that one run of the graph reads and writes."""

    state: State
    past: Buffer
    present: Buffer
    rows: slice
    before: Shape  # shape that the graph reads
    after: Shape  # shape that the graph writes
    addresses: Tuple[int, int]  # of what the graph reads and writes

    @property
    def arrays(self) -> Tuple[np.ndarray, np.ndarray]:
        """Views of the memory on the host that the graph reads and writes."""
        return self._view(self.past, self.before), self._view(self.present, self.after)

    def _view(self, buffer: Buffer, shape: Shape) -> np.ndarray:
        if self.state.grows:
            return buffer.array[: math.prod(shape)].reshape(shape)
        return buffer.array[(self.rows, *[slice(size) for size in shape[1 : self.state.axis + 1]])]


class RunMemory(List[StateMemory]):
    """The memory of the states of a run, and what a graph has bound of it for the next one."""

    bound: Any = None


class Graph(Protocol):
    """A loaded graph."""

    manifest: Manifest  # manifest of the artefact
    provider: str  # provider that runs the graph, a name that `load` takes
    device: str  # device of the buffers, "cpu" or "cuda"
    # Whether the graph accepts a view of the first slots of a buffer. Other graphs are given whole
    # buffers.
    strided: bool

    def run(self, run: GraphRun, states: Sequence[StateMemory]) -> np.ndarray:
        """Run the graph once and return its output [rows,S,*], or [rows,*] if it is pooled:
        `run.result` or another array. Raise GraphError if it failed.
        """

    def repeat(self, feeds: Feeds, states: Sequence[StateMemory], result: np.ndarray) -> BoundRun:
        """Return a function that runs the graph on the current content of `feeds` and `states`, and
        writes the first output to `result` [B,S,*]. It raises RUN_ERRORS if the graph fails.
        """


class Rules(NamedTuple):
    """Indices of the states of a graph by their update rule (State.update)."""

    in_place: Tuple[int, ...]
    growing: Tuple[int, ...]
    replaced: Tuple[int, ...]
    windowed: Tuple[int, ...]  # those in place of which queries read the last tokens only
    all_in_place: bool  # whether there are states, all of them written in place
    read_hidden: bool  # whether the graph reads slots past the tokens of a row

    @classmethod
    def of(cls, states: Sequence[State]) -> "Rules":
        """Return the rules of some states."""
        in_place = tuple([index for index, state in enumerate(states) if state.in_place])
        growing = tuple([index for index, state in enumerate(states) if state.grows])
        replaced = tuple([index for index, state in enumerate(states) if state.replaced])
        windowed = tuple([index for index, state in enumerate(states) if state.window])
        hidden = any([state.reads_hidden for state in states])
        return cls(in_place, growing, replaced, windowed, 0 < len(in_place) == len(states), hidden)


def part_of(row: int, axis: int, slots: Slots) -> Tuple[Any, ...]:
    """Return the index of some slots of a row along an axis."""
    return (row, *[slice(None)] * (axis - 1), slots)


def shape_of(state: State, rows: int, slots: int) -> Shape:
    """Return the shape of a state of some rows, with this number of slots if it has them."""
    axis = state.axis
    if not axis:
        return (rows, *state.axes[1:])  # type: ignore[arg-type]
    return (rows, *state.axes[1:axis], slots, *state.axes[axis + 1 :])  # type: ignore[arg-type]


def is_lazy(graph: Graph) -> bool:
    """Whether caches of a graph may have more slots than are used, of which no memory is taken."""
    states = [state for state in graph.manifest.states if state.in_place]
    reads = any([state.reads_hidden for state in states])
    fixed = graph.strided or graph.manifest.capacity_bucket
    return reserved_memory.AVAILABLE and graph.device == "cpu" and not reads and not fixed
