"""Tokens per second of steps of several rows, relative to one row.

    python -m bench.rows ARTEFACT ... [--cached 512] [--rounds 5] [--threads 2] [--processor-time] [--json bench/results/rows.json]

The numbers of rows take turns within one run; a ratio is the median of quotients of neighbouring times.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

import numpy as np

from posenc_export.runtime import load
from posenc_export.runtime.session.prefixes import BLOCK, Prefixes
from posenc_export.shared import json_rows

ROWS = (1, 4, 16)
STEPS = 3  # steps of a turn


def measured(folder: Path, cached: int, rounds: int, threads: int, clock: Callable[[], float]) -> Dict[str, Any]:
    """Return {"weights", "cached", "milliseconds": of a step of one row, "tokens": {rows: [median, least, largest] of tokens per second relative to one row}}."""
    model = load(folder, provider="cpu", threads=threads)
    manifest, random = model.manifest, np.random.default_rng(0)
    ids = random.integers(0, manifest.vocabulary, cached // BLOCK * BLOCK).tolist()
    read, prefixes = model.session(capacity=cached), Prefixes(model.graph.open, len(ids) // BLOCK)
    read.prefill(np.array([ids]), logits_to_keep=1)
    read.share(0, ids, prefixes)
    prefix, sessions = prefixes.find([*ids, 0]), {}
    for rows in ROWS:  # the content of the caches does not change the time, so that all rows begin with the same tokens, read once
        sessions[rows] = session = model.session(capacity=cached + (rounds + 2) * STEPS)
        for _ in range(rows):
            session.admit([[0]], prefix=prefix)
        session.step(np.zeros(rows, np.int64))
    times: Dict[int, Any] = {rows: [] for rows in ROWS}
    for _ in range(rounds):
        for rows, session in sessions.items():
            tokens = random.integers(0, manifest.vocabulary, rows)
            begun = clock()
            for _ in range(STEPS):
                session.step(tokens, copy=False)
            times[rows].append((clock() - begun) / STEPS)
    relative = {}
    for rows in ROWS[1:]:
        ratios = sorted(rows * one / many for one, many in zip(times[1], times[rows], strict=True))
        relative[str(rows)] = [round(value, 2) for value in (statistics.median(ratios), ratios[0], ratios[-1])]
    weights = manifest.weights.format if manifest.weights else manifest.dtype
    return {"weights": weights, "cached": cached, "milliseconds": round(statistics.median(times[1]) * 1e3, 2), "tokens": relative}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="ARTEFACT")
    parser.add_argument("--cached", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--processor-time", action="store_true", help="of the process, where other programs use the cores too; give one thread")
    options = parser.parse_args(arguments)
    clock = time.process_time if options.processor_time else time.perf_counter
    found = []
    for folder in options.folders:
        found.append(measured(folder, options.cached, options.rounds, options.threads, clock))
        print(found[-1], flush=True)
    if options.json:
        json_rows.write(options.json, {"threads": options.threads, "rounds": options.rounds, "clock": clock.__name__, "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
