"""Memory that takes pages of the system only where it is written, and can give them back."""

import math
import mmap
import sys
from typing import Sequence, Tuple

import numpy as np

AVAILABLE = sys.platform == "linux"
# Flags of Linux. Python 3.11 has no name for the last one, with which the system does not compare
# the size with its memory (linux/mman.h).
SHARED_WITH_NONE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | 0x4000


def reserved(shape: Sequence[int], dtype: np.dtype) -> Tuple[np.ndarray, mmap.mmap]:
    """Return an array of zeros, and the mapping in which it lies. Raise MemoryError if the system
    has no addresses for it.
    """
    try:
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=SHARED_WITH_NONE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"expected addresses for an array of {list(shape)}: {error}") from None
    try:
        # Large pages would take memory for slots that are never written.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError:  # a system without large pages
        pass
    return np.frombuffer(memory, dtype).reshape(shape), memory


def release(memory: mmap.mmap, begin: int, end: int) -> None:
    """Give the whole pages between two bytes back to the system: their content becomes zeros."""
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)
