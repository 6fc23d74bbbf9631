"""A temporary file for large arrays of an export, whose memory is released between their uses.

With rounding to 8 bits and the quick grid, SmolLM2-135M takes 2.7 GB at most, without this 3.8 GB.
"""

import bisect
import ctypes
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
DONTNEED, PAGEOUT = 4, 21  # of linux/mman.h, the latter since Linux 5.4
MAPS = Path("/proc/self/maps")  # on Linux only
# A mapping that is backed by a file.
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S{3}([sp]) \S+ \S+ [1-9]\d* +/")
Keep = Callable[[np.ndarray], np.ndarray]  # returns an array with the same content
Numbers = Union[torch.Tensor, np.ndarray]


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


def page_out(arrays: Iterable[Numbers]) -> int:
    """Ask the system to release the memory of arrays that are mapped from a file, which it reads
    again when needed, and of what was freed; on Linux only. Return the bytes of mapped arrays.
    """
    if not MAPS.exists():
        return 0
    mapped, library, asked = _mapped(), ctypes.CDLL(None), 0
    for array in arrays:
        address, size = _place(array)
        # Only pages that belong entirely to this array.
        first, end = _up(address), (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and (advice := _advice(mapped, first, end)):
            # On failure the pages stay in memory.
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
            asked += end - first
    # Of glibc, which keeps memory that was freed between other blocks.
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))
    return asked


def is_mapped(arrays: Iterable[Numbers]) -> List[bool]:
    """Return for each array whether it is mapped from a file; False on other systems than Linux."""
    mapped = _mapped() if MAPS.exists() else []
    places = [_place(array) for array in arrays]
    return [bool(size and _advice(mapped, first, first + size)) for first, size in places]


def _up(address: int) -> int:
    """Round up to a whole page."""
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE


def _place(array: Numbers) -> Tuple[int, int]:
    """Return the address of the first number, and the number of bytes."""
    first = array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
    return first, array.nbytes


def _advice(mapped: List[Tuple[int, int, int]], first: int, end: int) -> int:
    """Return the advice for addresses that are mapped from a file; 0 for others."""
    index = bisect.bisect_right(mapped, first, key=lambda part: part[0]) - 1
    return mapped[index][2] if index >= 0 and end <= mapped[index][1] else 0


def _mapped() -> List[Tuple[int, int, int]]:
    """Return the addresses of this process that are backed by a file, ascending, each with the
    advice that releases its memory and keeps its content: pages of a private mapping may have been
    written to, so that the system must keep them.
    """
    lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    matches = [match for match in map(MAPPING.match, lines) if match]
    advice = {True: DONTNEED, False: PAGEOUT}
    return [(int(m[1], 16), int(m[2], 16), advice[m[3] == "s"]) for m in matches]
