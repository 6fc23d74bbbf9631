"""A temporary file for large arrays of an export, whose pages the system drops if memory is short.

Of a decoder in 8 bits, memory that it cannot drop is at most 2.1 times the bytes of the weights,
without this 4.4 times (57 million weights, quick grid).
"""

import mmap
import os
import re
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, List, Optional, Tuple, Union, cast

import numpy as np
import torch

LEAST = 1 << 20  # bytes; smaller arrays stay in memory
# Bytes of the file that are mapped at a time; each mapping takes a file descriptor.
SEGMENT = 256 << 20
MAPS = Path("/proc/self/maps")  # on Linux only
# A mapping that is backed by a file.
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S{4} \S+ \S+ [1-9]\d* +/")
Keep = Callable[[np.ndarray], np.ndarray]  # returns an array with the same content


class WeightFile:
    """The file. It has no name on Linux, and is removed when the last array that is mapped from it
    is deleted. Elsewhere arrays stay in memory. folder: its disk is used; numbers may take as many
    bytes as the float32 weights of a model, for each of its roundings.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Optional[BinaryIO] = None
        self._segment: Optional[mmap.mmap] = None
        self._start = 0  # of the segment in the file
        self._used = 0  # bytes of the segment

    def keep(self, numbers: np.ndarray) -> np.ndarray:
        """Return an equal array, mapped from the file unless small. OSError: the disk is full."""
        if numbers.nbytes < LEAST or not MAPS.exists():
            return numbers
        memory, at = self._room(numbers.nbytes)
        assert self._file is not None
        content, place = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data, at
        while content:  # written, not copied to the mapping, in which a full disk ends the process
            written = os.pwrite(self._file.fileno(), content, self._start + place)
            content, place = content[written:], place + written
        return np.frombuffer(memory, numbers.dtype, numbers.size, at).reshape(numbers.shape)

    def keep_weights(self, model: torch.nn.Module) -> None:
        """Move the parameters of a float32 model that are not mapped from a file to this one."""
        parameters = list(model.parameters())
        for parameter, mapped in zip(parameters, is_mapped(parameters), strict=True):
            if not mapped:
                parameter.data = torch.from_numpy(self.keep(parameter.detach().numpy()))

    def _room(self, size: int) -> Tuple[mmap.mmap, int]:
        """Return a segment with room for `size` bytes, and where in it they begin."""
        at = _up(self._used)
        if self._segment is None or at + size > len(self._segment):
            if self._file is None:
                self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=self._folder))
                weakref.finalize(self, self._file.close)  # mappings keep the content
            descriptor, at = self._file.fileno(), 0
            self._start = os.fstat(descriptor).st_size
            os.truncate(descriptor, self._start + max(SEGMENT, _up(size)))
            self._segment = mmap.mmap(descriptor, max(SEGMENT, size), offset=self._start)
        self._used = at + size
        return self._segment, at


def in_memory(numbers: np.ndarray) -> np.ndarray:
    """Return the array itself: a Keep without a file."""
    return numbers


def is_mapped(arrays: Iterable[Union[torch.Tensor, np.ndarray]]) -> List[bool]:
    """Return for each array whether it is mapped from a file; False on other systems than Linux."""
    lines = MAPS.read_text(encoding="utf-8", errors="replace") if MAPS.exists() else ""
    matches = filter(None, map(MAPPING.match, lines.splitlines()))
    spans = [(int(match[1], 16), int(match[2], 16)) for match in matches]
    mapped = []
    for array in arrays:
        at = array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
        inside = [first <= at and at + array.nbytes <= end for first, end in spans]
        mapped.append(bool(array.nbytes) and any(inside))
    return mapped


def _up(count: int) -> int:
    """Round up to whole pages."""
    return -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
