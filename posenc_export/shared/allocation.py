"""Errors of memory allocation as ValueError, with the name and the size of what was allocated; and
memory that is kept.
"""

import contextlib
import ctypes
import math
import re
import sys
from typing import Iterator

# Messages of torch for an allocation that fails, or whose size overflows.
REFUSED = re.compile(
    r"you tried to allocate (\d+) bytes|Storage size calculation overflowed|numel: integer "
    r"multiplication overflow"
)
# Parameters of mallopt in glibc: sizes from which freed memory is returned to the system.
TRIM, MMAP = -1, -3
KEPT, RETURNED = 2**31 - 1, 2**25  # within `memory_kept`, and otherwise
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@contextlib.contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Turn failed allocations of numpy and torch into a ValueError that names `what`."""
    try:
        yield
    except MemoryError as error:
        # numpy's MemoryError has both, Python's has neither.
        shape, dtype = getattr(error, "shape", ()), getattr(error, "dtype", None)
        asked = 0 if dtype is None else dtype.itemsize * math.prod(map(int, shape))
        raise ValueError(_line(what, asked)) from None
    except RuntimeError as error:
        refused = REFUSED.search(str(error))
        if refused is None:
            raise
        raise ValueError(_line(what, int(refused[1] or 0))) from None


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """Let glibc keep the memory of large tensors when they are freed. Otherwise the system clears
    its pages for each tensor, which takes half the time of a call with many tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    try:
        mallopt(MMAP, KEPT)
        mallopt(TRIM, KEPT)
        yield
    finally:
        mallopt(MMAP, RETURNED)
        mallopt(TRIM, 2 * RETURNED)
        ctypes.CDLL(None).malloc_trim(0)


def _line(what: str, asked: int) -> str:
    rule = f"{what}: expected weights and tables that fit the memory of this machine"
    return f"{rule}, got an allocation of {_size(asked)}; choose smaller sizes"


def _size(count: int) -> str:
    """Format a number of bytes, 1536 as 1.5 KiB; 0 is a size that overflowed."""
    if not count:
        return "more than can be counted"
    unit = min((count.bit_length() - 1) // 10, len(UNITS) - 1)
    return f"{count / 1024**unit:.1f} {UNITS[unit]}"
