"""Times of calls that take turns, so that whatever else the machine does affects all of them."""

import time
from typing import Any, Callable, Dict, List, Mapping, TypeVar

Result = TypeVar("Result")
Clock = Callable[[], float]
CLOCKS = (time.process_time, time.perf_counter)  # for one thread, for several


def seconds(call: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Return the seconds of a call."""
    start = clock()
    call()
    return clock() - start


def in_turn(calls: Mapping[str, Callable[[], Result]], rounds: int) -> Dict[str, List[Result]]:
    """Make every call once a round. Return results by name, without those of a first round."""
    results: Dict[str, List[Result]] = {name: [] for name in calls}
    for _ in range(1 + rounds):
        for name, call in calls.items():
            results[name].append(call())
    return {name: of_call[1:] for name, of_call in results.items()}
