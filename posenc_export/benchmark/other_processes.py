"""How much of the machine other processes use."""

import os
import time
from pathlib import Path
from typing import Callable, Dict

import numpy as np

BUSY = 0.2  # cores used by other processes, above which the machine counts as busy
DURATION = 0.5  # seconds of a look at the machine


def watched(measure: Callable[[], float]) -> Dict[str, float]:
    """Return the seconds that `measure` returns, and the number of cores that other processes
    used meanwhile, below 0 by chance or without /proc/stat.
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
        time.sleep(DURATION)
        return DURATION

    return watched(wait)["other_cores"] > BUSY
