"""Make random calls on sessions.

    python -m tests.fuzz --minutes 30 --seed N --jobs 2 --json FILE

Exits with status 1 on a finding.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Iterator, Sequence


def sessions(number: int, jobs: int, end: float, providers: Sequence[str]) -> dict[str, Any]:
    """Fuzz sessions until `end` (time.time), on some providers only if given. Print a line per
    unit and return the totals.
    """
    from tests.fuzz import long

    stopped: list[int] = []
    signal.signal(
        signal.SIGTERM, lambda number, frame: stopped.append(number)
    )  # finished units are still reported
    groups: Iterator[Any] = long.groups(random.Random(number), providers)
    units: list[Any] = []
    running: set[Future[Any]] = set()
    turn = 0
    # Workers are replaced after a few modules, to free the memory that tracing leaves behind.
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=8
    ) as pool:
        while (time.time() < end and not stopped) or running:
            while time.time() < end and not stopped and len(running) < jobs:
                running.add(pool.submit(long.run_group, next(groups), number + turn, end))
                turn += 1
            finished, running = wait(running, timeout=5, return_when=FIRST_COMPLETED)
            for unit in (unit for future in finished for unit in future.result()):
                units.append(unit)
                print(long.line(unit), flush=True)
    return long.summary(units)


def main(arguments: list[str] | None = None) -> int:
    """Run the fuzzer. Returns the exit status: 0, or 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="random if not given")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the totals to FILE")
    parser.add_argument(
        "--providers",
        nargs="+",
        default=[],
        metavar="PROVIDER",
        help="of sessions, such as cuda (default: all that run here)",
    )
    options = parser.parse_args(arguments)
    number = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"seed {number}, {options.minutes:g} minutes, {options.jobs} jobs", flush=True)
    result: dict[str, Any] = {"seed": number, "minutes": options.minutes, "jobs": options.jobs}
    begun = time.time()
    end = begun + 60 * options.minutes
    result["sessions"] = sessions(number, options.jobs, end, options.providers)
    hidden = ("findings", "cannot_be_exported")
    print({name: value for name, value in result["sessions"].items() if name not in hidden})
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = len(result["sessions"].get("findings", []))
    print(f"{wrong} findings, {time.time() - begun:.0f} s, seed {number}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
