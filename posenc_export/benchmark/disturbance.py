"""Detects samples that other processes disturbed: they used the cores, our threads waited for one, or a fixed loop ran slower than before.

Spinning thread pools make one busy core of two cost a factor of 2.3 at short contexts, so such a sample is redone, never averaged in.
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Dict, List, Tuple

WAITED = 0.05  # share of the wall time our threads, together, may have waited for a core
OTHERS = 0.10  # cores that others may have used
SLOWED = 1.30  # reference loop against its quickest run
TICK = 1.0 / os.sysconf("SC_CLK_TCK")
SPIN = 60_000  # iterations, about 1 ms


@dataclass(frozen=True)
class Reading:
    """Seconds over a sample: wall, cpu of this process, cpu of all others, waits for a core, reference loop."""

    wall: float
    cpu: float
    others: float
    waited: float
    spin: float

    def to_json(self) -> Dict[str, float]:
        return asdict(self)


def watched(work: Callable[[], List[float]]) -> Tuple[List[float], Reading]:
    """The result of `work`, and the load of the machine while it ran."""
    before = (_busy(), _waited(), time.process_time(), time.perf_counter())
    values = work()
    after = (_busy(), _waited(), time.process_time(), time.perf_counter())
    busy, waited, cpu, wall = (b - a for a, b in zip(before, after, strict=True))
    return values, Reading(wall, cpu, max(0.0, busy - cpu), waited, min(_spin(), _spin()))


def disturbed(reading: Reading, quickest_spin: float, cores: int) -> bool:
    """quickest_spin: the shortest reference loop any worker saw. /proc/stat counts in ticks, one of which per core may be off."""
    return reading.waited > WAITED * reading.wall or reading.others > OTHERS * reading.wall + TICK * cores or reading.spin > SLOWED * quickest_spin


def _spin() -> float:
    start = time.perf_counter()
    for _ in range(SPIN):
        pass
    return time.perf_counter() - start


def _busy() -> float:
    """Seconds all cores together have not been idle; 0 where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except FileNotFoundError:
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = (int(field) for field in fields)
    return (user + nice + system + interrupts + soft + stolen) * TICK


def _waited() -> float:
    """Seconds the threads of this process have been ready to run without a core; 0 where the system does not tell."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text(encoding="ascii").split()[1])
        except (FileNotFoundError, ProcessLookupError, IndexError):  # the thread has just ended
            continue
    return total * 1e-9
