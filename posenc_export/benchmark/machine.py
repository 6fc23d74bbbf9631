"""The machine of a benchmark: processor, libraries, other processes."""

import contextlib
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Callable, Dict

import numpy as np

from posenc_export.benchmark.results import BUSY, Machine
from posenc_export.runtime.artefact.machine import processor

LOOK = 0.5  # seconds in which other processes are watched
LIBRARIES = """posenc-export numpy onnxruntime onnxruntime-gpu torch transformers onnxruntime-genai
    llama-cpp-python openvino""".split()


def watched(measure: Callable[[], float]) -> Dict[str, float]:
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


def busy_machine() -> bool:
    """Return whether other processes use the machine now."""

    def wait() -> float:
        time.sleep(LOOK)
        return LOOK

    return watched(wait)["other_cores"] > BUSY


def described(threads: int) -> Machine:
    """Return the machine, and versions of libraries. threads: those of one contestant."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(processor(), os.cpu_count() or 1, threads, versions, memory)
