"""The machine of a benchmark: processor, versions, limits of memory and arithmetic."""

import contextlib
import os
import platform
from importlib import metadata
from typing import Any

from posenc_export.benchmark.results import Limits, Machine, WorkingSet
from posenc_export.benchmark.workers import Worker
from posenc_export.runtime.artefact.machine import processor

LIBRARIES = (
    "posenc-export numpy onnxruntime onnxruntime-gpu torch transformers onnxruntime-genai openvino"
).split()
# Bytes, from the smallest cache of current processors to main memory.
WORKING_SETS = tuple(1 << power for power in range(18, 30, 2))
SQUARE = 1024  # rows and columns of the multiplied matrices
DURATION = 0.06  # seconds per measurement
TIMES = 3  # measurements, of which the shortest time counts


def described(threads: int) -> Machine:
    """Return processor, cores, and versions of libraries. threads: those of one contestant."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return Machine(processor(), os.cpu_count() or 1, threads, versions)


def limits(worker: Worker, threads: int) -> Limits:
    """Measure the limits of the machine in a worker without contestant. Of several measurements
    the shortest time counts, since disturbance only adds time.
    """

    def quickest(do: str, **request: Any) -> Any:
        return min(worker.ask(do, duration=DURATION, **request)["seconds"] for _ in range(TIMES))

    read = [WorkingSet(size, size / quickest("bandwidth", bytes=size)) for size in WORKING_SETS]
    flops = 2 * SQUARE**3 / quickest("gemm", width=SQUARE)
    empty = worker.ask("empty_run", duration=DURATION, threads=threads)["seconds"]
    return Limits(read, flops, empty)
