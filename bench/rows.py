"""Tokens per second of steps of several rows, relative to one row.

    python -m bench.rows ARTEFACT ... [--cached 512] [--rounds 5] [--threads 2] [--json bench/results/rows.json]

The numbers of rows take turns within one run; a ratio is the median of quotients of neighbouring times.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Dict, Sequence

import numpy as np

from posenc_export.runtime import load
from posenc_export.shared import json_rows

ROWS = (1, 4, 16)
STEPS = 3  # steps of a turn


def measured(folder: Path, cached: int, rounds: int, threads: int) -> Dict[str, Any]:
    """Return {"weights", "cached", "milliseconds": of a step of one row, "tokens": {rows: [median, least, largest] of tokens per second relative to one row}}."""
    model = load(folder, provider="cpu", threads=threads)
    manifest, random = model.manifest, np.random.default_rng(0)
    sessions = {}
    for rows in ROWS:
        sessions[rows] = session = model.session(batch=rows, capacity=cached + (rounds + 1) * STEPS)
        # The content of the cache does not change the time, and reading one prompt is faster than reading many.
        session.prefill(np.repeat(random.integers(0, manifest.vocabulary, (1, cached)), rows, 0), logits_to_keep=1)
        session.step(np.zeros(rows, np.int64))
        session.rewind(1)
    times: Dict[int, Any] = {rows: [] for rows in ROWS}
    for _ in range(rounds):
        for rows, session in sessions.items():
            tokens = random.integers(0, manifest.vocabulary, rows)
            begun = time.perf_counter()
            for _ in range(STEPS):
                session.step(tokens, copy=False)
            times[rows].append((time.perf_counter() - begun) / STEPS)
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
    options = parser.parse_args(arguments)
    found = []
    for folder in options.folders:
        found.append(measured(folder, options.cached, options.rounds, options.threads))
        print(found[-1], flush=True)
    if options.json:
        json_rows.write(options.json, {"threads": options.threads, "rounds": options.rounds, "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
