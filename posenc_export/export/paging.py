"""Weights of a checkpoint are mapped from its file: memory that the system can take back, because it can read the file again."""

import bisect
import ctypes
import mmap
import re
from pathlib import Path
from typing import Iterable, List, Tuple

import torch

PAGEOUT = 21  # MADV_PAGEOUT of linux/mman.h, since Linux 5.4: content is kept, unlike with MADV_DONTNEED
MAPS = Path("/proc/self/maps")
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +/")  # one with a file behind it


def page_out(tensors: Iterable[torch.Tensor]) -> int:
    """Ask the system to take back the memory of tensors that are mapped from a file, until they are read again. Does nothing where it cannot.

    Returns:
        Bytes that the system was asked for.
    """
    if not MAPS.exists():  # another system than Linux
        return 0
    mapped = _mapped()
    starts = [start for start, _ in mapped]
    asked, advise = 0, ctypes.CDLL(None).madvise
    for tensor in tensors:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages of this tensor alone
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        place = bisect.bisect_right(starts, first) - 1
        if first < end and place >= 0 and end <= mapped[place][1]:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), PAGEOUT)  # a refusal leaves things as they were
            asked += end - first
    return asked


def _mapped() -> List[Tuple[int, int]]:
    """Addresses of this process that have a file behind them, in their order."""
    found = [MAPPING.match(line) for line in MAPS.read_text(errors="replace").splitlines()]
    return [(int(match[1], 16), int(match[2], 16)) for match in found if match]
