"""Release the memory of weights that are mapped from a file; the system reads them from the file
again when needed.
"""

import bisect
import ctypes
import mmap
import re
from pathlib import Path
from typing import Iterable, List, Tuple, Union

import numpy as np
import torch

Numbers = Union[torch.Tensor, np.ndarray]
DONTNEED, PAGEOUT = 4, 21  # of linux/mman.h, the latter since Linux 5.4
MAPS = Path("/proc/self/maps")
# A mapping that is backed by a file.
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S{3}([sp]) \S+ \S+ [1-9]\d* +/")


def page_out(arrays: Iterable[Numbers]) -> int:
    """Ask the system to release the memory of arrays that are mapped from a file, and of what was
    freed. Has no effect on systems other than Linux.

    Returns:
        Number of bytes of mapped arrays.
    """
    if not MAPS.exists():  # not Linux
        return 0
    mapped, library, asked = _mapped(), ctypes.CDLL(None), 0
    for array in arrays:
        address, size = _place(array)
        # Only pages that belong entirely to this array.
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and (advice := _advice(mapped, first, end)):
            # On failure the pages stay in memory.
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
            asked += end - first
    # Of glibc, which keeps memory that was freed between other blocks.
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))
    return asked


def is_mapped(arrays: Iterable[Numbers]) -> List[bool]:
    """Return for each array whether it is mapped from a file; on systems other than Linux False."""
    mapped = _mapped() if MAPS.exists() else []
    return [
        bool(size and _advice(mapped, address, address + size))
        for address, size in map(_place, arrays)
    ]


def _place(array: Numbers) -> Tuple[int, int]:
    """Return the address of the first number, and the number of bytes."""
    return (
        array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
    ), array.nbytes


def _advice(mapped: List[Tuple[int, int, int]], first: int, end: int) -> int:
    """Return the advice for addresses that are mapped from a file; 0 for others."""
    place = bisect.bisect_right(mapped, first, key=lambda one: one[0]) - 1
    return mapped[place][2] if place >= 0 and end <= mapped[place][1] else 0


def _mapped() -> List[Tuple[int, int, int]]:
    """Return the address ranges of this process that are backed by a file, ascending, each with the
    advice that releases its memory and keeps its content.

    The pages of a shared mapping are those of the file. Those of a private one may have been
    written to, so that the system must keep them.
    """
    found = [
        MAPPING.match(line)
        for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    return [
        (int(match[1], 16), int(match[2], 16), DONTNEED if match[3] == "s" else PAGEOUT)
        for match in found
        if match
    ]
