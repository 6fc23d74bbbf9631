"""Release the memory of weights that are mapped from a checkpoint's file; the system reads them from the file again when needed."""

import bisect
import ctypes
import mmap
import re
from pathlib import Path
from typing import Iterable, List, Tuple

import torch

PAGEOUT = 21  # MADV_PAGEOUT of linux/mman.h, since Linux 5.4; unlike MADV_DONTNEED it keeps the content
MAPS = Path("/proc/self/maps")
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +/")  # a mapping that is backed by a file


def page_out(tensors: Iterable[torch.Tensor]) -> int:
    """Ask the system to page out tensors that are mapped from a file. Has no effect on systems other than Linux.

    Returns:
        Number of bytes requested to be paged out.
    """
    if not MAPS.exists():  # not Linux
        return 0
    mapped = _mapped()
    starts = [start for start, _ in mapped]
    asked, advise = 0, ctypes.CDLL(None).madvise
    for tensor in tensors:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # only pages that belong entirely to this tensor
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        place = bisect.bisect_right(starts, first) - 1
        if first < end and place >= 0 and end <= mapped[place][1]:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), PAGEOUT)  # on failure the pages stay in memory
            asked += end - first
    return asked


def _mapped() -> List[Tuple[int, int]]:
    """Return the address ranges of this process that are backed by a file, ascending."""
    found = [MAPPING.match(line) for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [(int(match[1], 16), int(match[2], 16)) for match in found if match]
