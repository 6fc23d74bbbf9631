"""The machine that was measured on: its processor, its libraries, and what it reaches without a model."""

import os
import platform
from importlib import metadata
from typing import Any, Dict

from posenc_export.benchmark.report import Limits, Machine, WorkingSet
from posenc_export.benchmark.workers import Worker
from posenc_export.runtime.proof import processor

LIBRARIES = ("posenc-export", "numpy", "onnxruntime", "onnxruntime-gpu", "torch", "transformers", "onnxruntime-genai", "optimum-onnx", "openvino")
WORKING_SETS = tuple(1 << power for power in (18, 20, 22, 24, 26, 28))  # bytes: within each cache of current processors, and beyond them
SQUARE = 1024  # rows and columns of the matrices that are multiplied
DURATION = 0.06  # seconds of measuring each time
TIMES = 3


def described(threads: int) -> Machine:
    """The machine and the versions of what is installed."""
    return Machine(processor(), os.cpu_count() or 1, threads, {"python": platform.python_version(), **_versions()})


def limits(meter: Worker, threads: int) -> Limits:
    """Measured by a worker, which has no contestant; the quickest of a few times, since others can only slow it down."""

    def quickest(do: str, **request: Any) -> Any:
        return min((meter.ask(do, duration=DURATION, **request)["seconds"] for _ in range(TIMES)))

    read = [WorkingSet(size, size / quickest("bandwidth", bytes=size)[0]) for size in WORKING_SETS]
    flops = 2 * SQUARE**3 / quickest("gemm", width=SQUARE)[0]
    empty = meter.ask("empty_run", duration=DURATION, threads=threads)["seconds"]
    return Limits(read, flops, empty[0] if empty else None)


def _versions() -> Dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
