"""Temporary files for large arrays of an export, whose pages the system drops if memory is short.

For a decoder in 8 bits, memory that the system cannot drop is at most 2.1 times the bytes of the
weights; without these files, it is 4.4 times (57 million weights, quick grid).
"""

import re
import tempfile
from pathlib import Path
from typing import Callable, Iterable

import numpy as np
import torch

LEAST = 1 << 20  # bytes; smaller arrays stay in memory
MAPS = Path("/proc/self/maps")  # on Linux only
# A mapping that is backed by a file.
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S{4} \S+ \S+ [1-9]\d* +/")
Keep = Callable[[np.ndarray], np.ndarray]  # returns an array with the same content


def in_file(folder: Path, numbers: np.ndarray) -> np.ndarray:
    """Return an equal array, mapped from a file unless small. OSError: the disk is full.

    On Linux the file has no name, and is removed when the array is deleted; elsewhere arrays stay
    in memory. folder: on the disk to use. Each rounding of a model may take as many bytes as its
    float32 weights.
    """
    if numbers.nbytes < LEAST or not MAPS.exists():
        return numbers
    # Written first: on a full disk, a write to the mapping would end the process.
    with tempfile.TemporaryFile(dir=folder) as stream:
        stream.write(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data)
        stream.flush()
        path = f"/proc/self/fd/{stream.fileno()}"  # the mapping keeps no descriptor
        mapped = torch.from_file(path, True, numbers.nbytes, dtype=torch.uint8)
    return mapped.numpy().view(numbers.dtype).reshape(numbers.shape)


def in_memory(numbers: np.ndarray) -> np.ndarray:
    """Return the array itself: a Keep without a file."""
    return numbers


def is_mapped(arrays: Iterable[torch.Tensor | np.ndarray]) -> list[bool]:
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
