"""The number of threads of one operator, from the size of a model's products."""

import os
from typing import Optional, Union

from posenc_export.runtime.artefact.manifest import Manifest

AUTO = "auto"
Threads = Union[None, int, str]  # None, a number, or AUTO
PRODUCTS = (
    "Conv", "DynamicQuantizeMatMul", "Gemm", "MatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "MatMulNBits", "MoE", "QMoE",
)  # fmt: skip
# With 2 threads instead of 1, a step of a decoder with 14,000 numbers per product takes 1.03 of the
# time, of a block with 130,000 numbers 0.97, with 520,000 numbers 0.60; 512 tokens of the first two
# take 0.73 and 0.63 (bench/threads.py of commit dc58e7a on 2 cores; ONNX Runtime 1.31, AMD EPYC).
# So prompts gain from a second thread in any case, and steps gain from threads that get about this
# many numbers. More cores were not measured.
SHARE = 1 << 16
LEAST = 2  # threads of the smallest model


def chosen(threads: Threads, manifest: Manifest) -> Optional[int]:
    """Return the number of threads, or None for all cores: for AUTO, a thread for every SHARE
    numbers of a product, at least LEAST and at most all cores.
    """
    if threads != AUTO:
        return threads  # type: ignore[return-value]
    products = sum(count for name, count in manifest.operators.items() if name in PRODUCTS)
    if not products or not manifest.step_weights:  # a graph of torch, or an early manifest
        return None
    count = max(LEAST, manifest.step_weights // products // SHARE)
    return None if count >= cores() else count


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def said(manifest: Manifest) -> str:
    """Return what AUTO chooses on this machine, for `posenc inspect`."""
    count = chosen(AUTO, manifest)
    return (
        f"{cores() if count is None else count} of {cores()} cores, by the size of its products "
        "(threads=auto)"
    )
