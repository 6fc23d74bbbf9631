"""Graph inputs of repeated steps in device memory, which are bound once."""

from typing import Collection, Dict, List, Tuple

import numpy as np
import onnxruntime

from posenc_export.runtime.session.state import Feeds

ON_HOST = "total_sequence_length"  # GroupQueryAttention reads it in host memory


class DeviceFeeds:
    """Copies of graph inputs on the device. Inputs that share memory on the host, as counters of one dtype do, share it on the device, and are copied together.

    Args:
        feeds: graph inputs by name, contiguous in their memory. ON_HOST has no copy.
        constant: names of inputs that are copied only once.

    Attributes:
        addresses: address of each input on the device.
    """

    def __init__(self, feeds: Feeds, constant: Collection[str]) -> None:
        self.addresses: Dict[str, int] = {}
        self._values: Dict[int, Tuple[np.ndarray, onnxruntime.OrtValue]] = {}  # by address on the host: memory there, and its copy
        changing = set()
        for name, array in feeds.items():
            if name != ON_HOST:
                block = array if array.base is None else array.base
                at = int(block.ctypes.data)
                if at not in self._values:
                    self._values[at] = block, onnxruntime.OrtValue.ortvalue_from_numpy(block, "cuda", 0)
                self.addresses[name] = int(self._values[at][1].data_ptr()) + int(array.ctypes.data) - at
                changing |= {at} if name not in constant else set()
        self._changing: List[Tuple[np.ndarray, onnxruntime.OrtValue]] = [self._values[at] for at in changing]

    def update(self) -> None:
        """Copy the inputs that are not constant to the device."""
        for block, value in self._changing:
            value.update_inplace(block)
