"""A temporary file that an export keeps large arrays in. They are mapped into memory, so that it
can be released between their uses (paging.py).
"""

import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO, Callable, Optional, cast

import numpy as np
import torch

from posenc_export.export.paging import MAPS, is_mapped

LEAST = 1 << 20  # bytes; smaller arrays stay in memory
# Bytes of the file that are mapped at a time; each mapping takes a file descriptor.
SEGMENT = 256 << 20
Keep = Callable[[np.ndarray], np.ndarray]  # returns an array with the same content


class WeightFile:
    """The file. It has no name on Linux, and is removed when the last array that is mapped from it
    is deleted. Elsewhere arrays stay in memory.

    Args:
        folder: its disk is used; numbers may take as many bytes as the float32 weights of a model,
            for each of its roundings.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Optional[BinaryIO] = None
        self._segment: Optional[mmap.mmap] = None
        self._start = self._used = (
            0  # of the segment in the file, and of the next array in the segment
        )

    def keep(self, numbers: np.ndarray) -> np.ndarray:
        """Return an array with the same content that is mapped from the file, or a small array
        itself.

        Raises:
            OSError: the disk is full.
        """
        if numbers.nbytes < LEAST or not MAPS.exists():
            return numbers
        memory, at = self._room(numbers.nbytes)
        content = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data
        while content:  # written, not copied to the mapping, in which a full disk ends the process
            assert self._file is not None
            content = content[
                os.pwrite(
                    self._file.fileno(), content, self._start + at + numbers.nbytes - len(content)
                ) :
            ]
        return np.frombuffer(memory, numbers.dtype, numbers.size, at).reshape(numbers.shape)

    def keep_weights(self, model: torch.nn.Module) -> None:
        """Move the parameters of a float32 model that are not mapped from a file to this one."""
        parameters = list(model.parameters())
        for parameter, mapped in zip(parameters, is_mapped(parameters), strict=True):
            if not mapped:
                parameter.data = torch.from_numpy(self.keep(parameter.detach().numpy()))

    def _room(self, size: int) -> "tuple[mmap.mmap, int]":
        """Return a segment with room for `size` bytes, and where in it they begin."""
        at = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._segment is None or at + size > len(self._segment):
            if self._file is None:
                self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=self._folder))
                weakref.finalize(self, self._file.close)  # mappings keep the content
            self._start = os.fstat(self._file.fileno()).st_size
            os.truncate(
                self._file.fileno(),
                self._start + max(SEGMENT, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE),
            )
            self._segment = mmap.mmap(self._file.fileno(), max(SEGMENT, size), offset=self._start)
            at = 0
        self._used = at + size
        return self._segment, at


def in_memory(numbers: np.ndarray) -> np.ndarray:
    """Return the array itself: a Keep without a file."""
    return numbers
