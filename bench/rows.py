"""Tokens per second of steps of several rows, of artefacts and of other runtimes with the same
weights.

    python -m bench.rows ARTEFACT ... [--peers MODEL.gguf] [--folder build/bits] [--cached 512]
    [--rounds 5] [--threads 2] [--processor-time] [--write]

All contestants and numbers of rows take turns within one run; a ratio is the median of quotients of
neighbouring times. --peers adds transformers, with the weights in float32, and llama.cpp, which
runs the file. Their environment and checkpoint are those of bench.bits, in its --folder. --write
writes bench/results/rows.json and the table of docs/beyond.md.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from bench import bits, marked
from posenc_export.runtime import Session, load
from posenc_export.runtime.session.prefixes import BLOCK, Prefixes
from posenc_export.shared import json_rows

ROWS = (1, 4, 16)
STEPS = 12  # of a turn
RESULTS, PAGE = (
    Path(__file__).parent / "results" / "rows.json",
    Path(__file__).parents[1] / "docs" / "beyond.md",
)
Step = Callable[[int], float]  # takes a number of rows, and returns the seconds of a step


class Own:
    """An artefact."""

    def __init__(self, folder: Path, cached: int, threads: int, clock: str) -> None:
        model = load(folder, provider="cpu", threads=threads)
        manifest = model.manifest
        self.clock: Callable[[], float] = getattr(time, clock)
        self.label = f"`{manifest.weights.format if manifest.weights else manifest.dtype}`"
        ids = some_ids(manifest.vocabulary, cached)
        read, prefixes = (
            model.session(capacity=cached),
            Prefixes(model.graph.open, len(ids) // BLOCK),
        )
        read.prefill(np.array([ids]), logits_to_keep=1)
        read.share(0, ids, prefixes)
        prefix = prefixes.find([*ids, 0])
        self.sessions: Dict[int, Session] = {}
        # The content of the caches does not change the time, so that all rows begin with the same
        # tokens, read once.
        for rows in ROWS:
            self.sessions[rows] = session = model.session(capacity=cached + STEPS + 2)
            for _ in range(rows):
                session.admit([[0]], prefix=prefix)

    def step(self, rows: int) -> float:
        session, tokens = self.sessions[rows], np.zeros(rows, np.int64)
        begun = self.clock()
        for _ in range(STEPS):
            session.step(tokens, copy=False)
        taken = (self.clock() - begun) / STEPS
        session.rewind(STEPS)
        return taken


def some_ids(vocabulary: int, cached: int) -> List[int]:
    """Return random ids for about `cached` tokens, whole blocks of a shared prefix."""
    found: List[int] = (
        np.random.default_rng(0).integers(0, vocabulary, cached // BLOCK * BLOCK).tolist()
    )
    return found


def peers(model: Path, folder: Path, cached: int, threads: int, clock: str) -> Dict[str, Step]:
    """Open transformers and llama.cpp."""
    python = Path(sys.executable)
    opened = {
        "transformers, float32": bits.Peer(
            python, "transformers", bits.checkpoint(python, model, folder), threads
        ),
        f"llama.cpp, {model.suffixes[-2].lstrip('.')}": bits.Peer(
            bits.environment("llama.cpp", folder), "llama.cpp", model, threads, max(ROWS)
        ),
    }
    ids = some_ids(1000, cached)  # ids that every vocabulary has
    return {
        label: lambda rows, peer=peer: peer.step_of_rows(ids, rows, STEPS, clock)
        for label, peer in opened.items()
    }  # type: ignore[misc]


def measured(contestants: Dict[str, Step], rounds: int) -> List[Dict[str, Any]]:
    """Return {"contestant", "milliseconds": of a step of one row, "tokens": {rows: [median,
    least, largest] of tokens per second relative to one row}} of each.
    """
    times: Dict[str, Dict[int, List[float]]] = {
        label: {rows: [] for rows in ROWS} for label in contestants
    }
    for number in range(rounds + 1):  # the first round warms up
        for label, step in contestants.items():
            for rows in ROWS:
                seconds = step(rows)
                times[label][rows] += [seconds] if number else []
        print(f"round {number} of {rounds}", flush=True)
    found = []
    for label, taken in times.items():
        relative = {}
        for rows in ROWS[1:]:
            ratios = sorted(
                rows * one / many for one, many in zip(taken[1], taken[rows], strict=True)
            )
            relative[str(rows)] = [
                round(value, 2) for value in (statistics.median(ratios), ratios[0], ratios[-1])
            ]
        speed = {
            str(rows): round(statistics.median(rows / seconds for seconds in taken[rows]), 1)
            for rows in ROWS
        }
        found.append(
            {
                "contestant": label,
                "milliseconds": round(statistics.median(taken[1]) * 1e3, 2),
                "per_second": speed,
                "tokens": relative,
            }
        )
    return found


def table(found: Dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    clock = (
        "in processor time, because other programs used the cores"
        if found["clock"] == "process_time"
        else "in wall time"
    )
    threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
    note = (
        f"After {found['cached']} cached tokens; medians of {found['rounds']} rounds of {STEPS} "
        f"steps in which all took turns, with {threads}, {clock}."
    )
    heads = [
        f"tokens per second of {rows} rows" if rows > 1 else "tokens per second of one row"
        for rows in ROWS
    ]
    heads += [f"{rows} rows over one" for rows in ROWS[1:]]
    lines = [f"| runtime or weights | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for row in found["rows"]:
        speeds = [f"{row['per_second'][str(rows)]:.0f}" for rows in ROWS]
        ratios = [
            "{:.2f} ({:.2f} .. {:.2f})".format(*row["tokens"][str(rows)]) for rows in ROWS[1:]
        ]
        lines.append(f"| {' | '.join([row['contestant'], *speeds, *ratios])} |")
    return "\n".join([note, "", *lines]) + "\n"


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Measure the contestants and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artefacts", nargs="+", type=Path, metavar="ARTEFACT")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="MODEL.gguf",
        help="also measure transformers and llama.cpp with this file",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/bits"),
        help="of environment and checkpoint of the peers (default: build/bits)",
    )
    parser.add_argument("--cached", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of the process, where other programs use the cores too; give one thread",
    )
    parser.add_argument("--write", action="store_true", help="write results and page")
    options = parser.parse_args(arguments)
    clock = "process_time" if options.processor_time else "perf_counter"
    shared = options.cached, options.threads, clock
    own = [Own(folder, *shared) for folder in options.artefacts]
    contestants: Dict[str, Step] = {one.label: one.step for one in own}
    if options.peers:
        options.folder.mkdir(parents=True, exist_ok=True)
        contestants |= peers(options.peers, options.folder.resolve(), *shared)
    found = {
        "cached": options.cached,
        "threads": options.threads,
        "rounds": options.rounds,
        "clock": clock,
        "rows": measured(contestants, options.rounds),
    }
    print(table(found))
    if options.write:
        json_rows.write(RESULTS, found)
        marked.replace(PAGE, "rows", table(found))


if __name__ == "__main__":
    main()
