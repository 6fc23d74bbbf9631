"""Records of the calls that the CUDA provider makes to the stub runtime (stub/cudart.h)."""

import collections
import contextlib
import ctypes
import os
import tempfile
from typing import Iterator

TF32 = "3"  # CUBLAS_TF32_TENSOR_OP_MATH
ATTENTION = {
    "flash": "flash_fwd",
    "XQA": "kernel_mha",
    "unfused": "UnfusedSoftmaxKernel",
    "memory efficient": "AttentionKernel",
}  # parts of names of kernels
STUB = ctypes.CDLL("libcudart.so.13")


class Record:
    """What happened during one recorded action.

    Attributes:
        kernels: launches by mangled name of the kernel.
        products: number of products of cuBLAS.
        tf32: number of those in TF32.
        copies, bytes: number and bytes of copies by direction: "H2D", "D2H", "D2D", "H2H" (host,
            device).
        counts: other calls by name: MEMSET, MALLOC, SYNC stream, CAPTURE_BEGIN, CAPTURE_ILLEGAL,
            CAPTURED_COPY, GRAPH_LAUNCH, ...
        faults: launches beyond a limit of the device, and rows for which unfused attention shifts
            the causal mask.
    """

    def __init__(self) -> None:
        self.kernels: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self.products = self.tf32 = 0
        self.faults: list[str] = []
        self._math_mode = "0"

    def add(self, line: str) -> None:
        """Add one line of the log."""
        word, _, rest = line.partition(" ")
        values = rest.split()
        if word == "KERNEL":
            self.kernels[values[0]] += 1
        elif word == "PRODUCT":
            self.products += 1
            self.tf32 += self._math_mode == TF32
        elif word == "MATH_MODE":
            self._math_mode = values[0]
        elif word == "COPY":
            self.copies[values[1]] += 1
            self.bytes[values[1]] += int(values[2])
        elif word in ("BAD_LAUNCH", "NEGATIVE_PAST"):
            self.faults.append(line)
        else:
            self.counts[line if word in ("SYNC", "CAPTURE_ILLEGAL") else word] += 1

    @property
    def launches(self) -> int:
        """Number of kernels and products."""
        return self.kernels.total() + self.products

    @property
    def attention(self) -> list[str]:
        """The kinds of attention kernels that were launched."""
        return [
            kind for kind, part in ATTENTION.items() if any(part in name for name in self.kernels)
        ]

    def moved(self) -> dict[str, str]:
        """Return the copies as text by direction."""
        return {
            way: f"{count} ({self.bytes[way]} bytes)" for way, count in sorted(self.copies.items())
        }


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record the calls made inside a with block. The record is complete when the block is left."""
    record = Record()
    handle, path = tempfile.mkstemp()
    os.close(handle)
    STUB.dry_run_log(path.encode())
    try:
        yield record
    finally:
        STUB.dry_run_log(b"")
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                record.add(line.rstrip("\n"))
        os.unlink(path)
