"""Graph inputs of repeated steps in device memory, which are bound once."""

from typing import Collection, Dict, List, Tuple

import numpy as np
import onnxruntime

from posenc_export.runtime.session.state import Feeds

ON_HOST = "total_sequence_length"  # GroupQueryAttention reads it in host memory
ALIGNMENT = 256  # bytes, as cudaMalloc aligns memory


class DeviceFeeds:
    """Graph inputs on the device. Those that change are copied there together, since each copy waits for the device.

    Args:
        feeds: graph inputs by name, contiguous in the memory of their base. ON_HOST has no copy.
        constant: names of inputs that are copied only once.

    Attributes:
        addresses: address of each input on the device.
    """

    def __init__(self, feeds: Feeds, constant: Collection[str]) -> None:
        blocks = {int(block.ctypes.data): block for block in map(_block, feeds.values())}  # memory on the host; counters of one dtype share theirs
        changing = {int(_block(array).ctypes.data) for name, array in feeds.items() if name not in (*constant, ON_HOST)}
        places, size = {}, 0
        for at in sorted(changing):
            places[at] = size
            size += -(-blocks[at].nbytes // ALIGNMENT) * ALIGNMENT
        self._staged = np.zeros(size, np.uint8)
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy(self._staged, "cuda", 0)
        self._pairs: List[Tuple[np.ndarray, np.ndarray]] = [
            (self._staged[first : first + blocks[at].nbytes].view(blocks[at].dtype), blocks[at].reshape(-1)) for at, first in places.items()
        ]
        fixed = {_block(feeds[name]).ctypes.data for name in feeds if name in constant} - changing
        self._constants = {at: onnxruntime.OrtValue.ortvalue_from_numpy(blocks[at], "cuda", 0) for at in fixed}
        begins = {at: int(self._value.data_ptr()) + first for at, first in places.items()} | {at: int(value.data_ptr()) for at, value in self._constants.items()}
        self.addresses: Dict[str, int] = {}
        for name, array in feeds.items():
            if name != ON_HOST:
                at = int(_block(array).ctypes.data)
                self.addresses[name] = begins[at] + int(array.ctypes.data) - at

    def update(self) -> None:
        """Copy the inputs that are not constant to the device."""
        for staged, block in self._pairs:
            staged[...] = block
        self._value.update_inplace(self._staged)


def _block(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of another one."""
    return array if array.base is None else array.base
