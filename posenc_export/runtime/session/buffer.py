"""State buffers that a graph reads and writes by address."""

from typing import Any, Sequence

import numpy as np

ELEMENTS = {"bfloat16": ("uint16", 16)}  # dtypes that numpy lacks: the dtype of the same size that holds their bits, and TensorProto.DataType


class Buffer:
    """Memory of one state, on the host (numpy) or on the device (OrtValue).

    Args:
        shape, dtype: shape and dtype of the content.
        fill: initial value of every element.
        device: "cpu" or "cuda".
    """

    def __init__(self, shape: Sequence[int], dtype: str, fill: int, device: str) -> None:
        dtype, element = ELEMENTS.get(dtype, (dtype, 0))
        self.shape, self.device, self.fill = tuple(shape), device, fill
        # The operating system allocates zeroed pages when they are first written, so a large capacity costs nothing until it is used.
        self.array: np.ndarray = np.full(self.shape, fill, dtype) if fill else np.zeros(self.shape, dtype)
        self.address, self.dtype = int(self.array.ctypes.data), self.array.dtype
        self.element: Any = element or self.dtype
        self.row_bytes = self.array[:1].nbytes
        if device == "cuda":
            import onnxruntime

            # Device memory of any element type: the graph is given its address, and the element type when it is bound.
            self.value: Any = onnxruntime.OrtValue.ortvalue_from_numpy(self.array, "cuda", 0)
            self.address = int(self.value.data_ptr())

    def touch(self) -> None:
        """Write the initial value everywhere, so that the operating system provides all of the memory now."""
        if self.device == "cpu":
            self.array.fill(self.fill)

    def read(self) -> np.ndarray:
        """Return the content: a view of host memory, or a copy of device memory."""
        return self.array if self.device == "cpu" else self.value.numpy()  # type: ignore[no-any-return]

    def write(self, content: np.ndarray) -> None:
        """Overwrite the content with an array of the same shape."""
        if self.device == "cpu":
            if content is not self.array:
                self.array[...] = content
        else:
            self.value.update_inplace(np.ascontiguousarray(content))
