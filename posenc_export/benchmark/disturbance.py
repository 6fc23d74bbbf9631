"""Detect samples that were disturbed by other processes, by three signs: they used CPU time, our threads waited for a core, or a fixed loop ran slower.

Disturbed samples are measured again instead of averaged: with spinning thread pools, one busy core of two slows short contexts down by a factor of 2.3.
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Dict, List, Tuple

WAITED = 0.05  # largest waiting time for a core, summed over our threads, as a share of the wall time
OTHERS = 0.10  # largest use by other processes, in cores
SLOWED = 1.30  # largest time of the reference loop, as a multiple of its shortest time
TICK = 1.0 / os.sysconf("SC_CLK_TCK")
SPIN = 60_000  # iterations, about 1 ms


@dataclass(frozen=True)
class Reading:
    """Load of the machine during one sample.

    Args:
        wall: wall time in seconds.
        cpu: CPU seconds of this process.
        others: CPU seconds of all other processes.
        waited: seconds that threads of this process waited for a core.
        spin: seconds of the reference loop after the sample.
    """

    wall: float
    cpu: float
    others: float
    waited: float
    spin: float

    def to_json(self) -> Dict[str, float]:
        return asdict(self)


def watched(work: Callable[[], List[float]]) -> Tuple[List[float], Reading]:
    """Run `work`; return its result and the load of the machine meanwhile."""
    before = (_busy(), _waited(), time.process_time(), time.perf_counter())
    values = work()
    after = (_busy(), _waited(), time.process_time(), time.perf_counter())
    busy, waited, cpu, wall = (b - a for a, b in zip(before, after, strict=True))
    return values, Reading(wall, cpu, max(0.0, busy - cpu), waited, min(_spin(), _spin()))


def disturbed(reading: Reading, quickest_spin: float, cores: int) -> bool:
    """Return whether a sample was disturbed.

    Args:
        reading: load of the machine during the sample.
        quickest_spin: shortest time of the reference loop in any worker, in seconds.
        cores: number of cores; /proc/stat may be off by one tick per core.
    """
    return reading.waited > WAITED * reading.wall or reading.others > OTHERS * reading.wall + TICK * cores or reading.spin > SLOWED * quickest_spin


def _spin() -> float:
    start = time.perf_counter()
    for _ in range(SPIN):
        pass
    return time.perf_counter() - start


def _busy() -> float:
    """Return the seconds that all cores together were busy since boot; 0 on systems without /proc/stat."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except FileNotFoundError:
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = (int(field) for field in fields)
    return (user + nice + system + interrupts + soft + stolen) * TICK


def _waited() -> float:
    """Return the seconds that threads of this process were ready to run but had no core; 0 on systems without schedstat."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text(encoding="ascii").split()[1])
        except (FileNotFoundError, ProcessLookupError, IndexError):  # the thread ended in the meantime
            continue
    return total * 1e-9
