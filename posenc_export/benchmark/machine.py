"""The machine of a benchmark: processor, limits of memory and arithmetic, other processes."""

import contextlib
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Callable

import numpy as np

from posenc_export.benchmark.results import Limits, Machine, WorkingSet
from posenc_export.benchmark.workers import Worker
from posenc_export.runtime.artefact.machine import processor
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import BYTES

# Bytes per weight, with its share of a float32 scale
FORMAT_BYTES = {"int8": 1.0, "int8-32": 1 + 4 / 32, "int4": 0.5 + 4 / 32, "int4-128": 0.5 + 4 / 128}
FORMAT_BYTES["keep"] = FORMAT_BYTES["int4"]
LIBRARIES = """posenc-export numpy onnxruntime onnxruntime-gpu torch transformers onnxruntime-genai
    llama-cpp-python openvino""".split()
# Bytes, from the smallest cache of current processors to main memory.
WORKING_SETS = tuple(1 << power for power in range(18, 30, 2))
DURATION = 0.06  # seconds per measurement
TIMES = 3  # measurements, of which the shortest time counts


def watched(measure: Callable[[], float]) -> dict[str, float]:
    """Return the seconds that `measure` returns, and the cores that other processes used meanwhile,
    below 0 by chance or without /proc/stat.
    """
    before = np.array((_busy_seconds(), time.process_time(), time.perf_counter()))
    seconds = measure()
    busy, own, wall = np.array((_busy_seconds(), time.process_time(), time.perf_counter())) - before
    return {"seconds": seconds, "other_cores": float((busy - own) / wall)}


def _busy_seconds() -> float:
    """Return the seconds since boot in which cores were busy; 0 without /proc/stat."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except FileNotFoundError:
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, fields)
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def step_bytes(manifest: Manifest, context: int, batch: int = 1) -> int:
    """Return the bytes a decode step must read: weights once, the valid cache of each row."""
    of_weight: float = BYTES[manifest.dtype]
    if manifest.weights is not None:  # each weight may have a format of its own
        names = manifest.formats.values() or (manifest.weights.format,)
        of_weight = min(FORMAT_BYTES[name] for name in names)
    return round(of_weight * manifest.step_weights) + batch * context * manifest.slot_bytes


def described(threads: int) -> Machine:
    """Return the machine, and versions of libraries. threads: those of one contestant."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(processor(), os.cpu_count() or 1, threads, versions, memory)


def limits(worker: Worker) -> Limits:
    """Measure the limits of the machine in a worker without contestant, by the shortest times."""
    read = []
    for size in WORKING_SETS:
        replies = [worker.ask("bandwidth", bytes=size, duration=DURATION) for _ in range(TIMES)]
        read.append(WorkingSet(size, size / min(reply["seconds"] for reply in replies)))
    return Limits(read)
