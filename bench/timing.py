"""Times of calls that take turns, so that whatever else the machine does affects all of them."""

import statistics
import time
from typing import Any, Callable, Mapping, TypeVar

Result = TypeVar("Result")
Clock = Callable[[], float]
CLOCKS = (time.process_time, time.perf_counter)  # for one thread, for several


def seconds(call: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Return the seconds of a call."""
    start = clock()
    call()
    return clock() - start


def median_seconds(call: Callable[[], Any], times: int, warm: int = 0) -> float:
    """Return the median of the seconds of `times` calls, which follow `warm` others."""
    return statistics.median([seconds(call) for _ in range(warm + times)][warm:])


def in_turn(
    calls: Mapping[str, Callable[[], Result]], rounds: int, warm: int = 1
) -> dict[str, list[Result]]:
    """Make every call once a round. Return results by name, without the first `warm` rounds."""
    results: dict[str, list[Result]] = {name: [] for name in calls}
    for number in range(warm + rounds):
        for name, call in calls.items():
            result = call()
            if number >= warm:
                results[name].append(result)
    return results
