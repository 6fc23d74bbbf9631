"""Memory that is not there, said by name and size."""

import contextlib
import re
from typing import Iterator

# What torch says where an allocation fails, or where its size has no number.
REFUSED = re.compile(r"you tried to allocate (\d+) bytes|Storage size calculation overflowed|numel: integer multiplication overflow")
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@contextlib.contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """While open, an allocation that numpy or torch cannot make is an error about `what`.

    Raises:
        ValueError: such an allocation, with the size asked for.
    """
    try:
        yield
    except MemoryError as error:
        shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)  # of numpy's own; Python's has neither
        asked = dtype.itemsize if dtype is not None else 0
        for axis in shape or ():
            asked *= int(axis)
        raise ValueError(_line(what, asked)) from None
    except RuntimeError as error:
        refused = REFUSED.search(str(error))
        if refused is None:
            raise
        raise ValueError(_line(what, int(refused[1] or 0))) from None


def _line(what: str, asked: int) -> str:
    return f"{what}: weights and tables fit the memory of this machine, got {_size(asked)} asked for at once; choose smaller sizes"


def _size(count: int) -> str:
    """1536 as 1.5 KiB; 0 stands for a size that has no number."""
    if not count:
        return "more than can be counted"
    unit = min((count.bit_length() - 1) // 10, len(UNITS) - 1)
    return f"{count / 1024**unit:.1f} {UNITS[unit]}"
