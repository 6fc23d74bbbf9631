"""What prefix sharing saves, and how long running streams wait while a prompt is read.

    python -m bench.prefixes ARTEFACT [--rounds 5] [--threads 2] [--json FILE]

Time to the first token of prompts of 1,000 + 50 tokens, whose first 1,000 are known, over that of an engine without memory for prefixes; both take turns. Longest and
median time between two tokens of 4 running rows while a prompt of 4,000 tokens arrives, over the median time between their tokens before it, and after it, when they
have grown. In wall time, which other programs lengthen, and in processor time of the engine's thread, all of the work with one thread. Medians over rounds, least, most.
"""

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import numpy as np

from posenc_export.runtime import load
from posenc_export.runtime.session.model import Model
from posenc_export.serve.engine import Engine
from posenc_export.serve.requests import Limits, Request, Token
from posenc_export.shared import json_rows

KNOWN, NEW, LONG, RUNNING = 1000, 50, 4000, 4
AROUND = 40  # tokens of each running row before the long prompt arrives, and after it has left


class Timed:
    """An engine, and the times at which the tokens of each request arrived: on the clock, and of the processor."""

    def __init__(self, model: Model, memory: int) -> None:
        self.times: Dict[Request, List[Tuple[float, float]]] = {}
        self.ended: Dict[Request, threading.Event] = {}
        self.arrived = threading.Condition()
        self.engine = Engine(
            model,
            Limits(RUNNING + 1, 64, LONG + 96, LONG + 8, LONG, 256, prefix_memory=memory),
            self.take,
        )

    def take(self, tokens: List[Token]) -> None:
        now = time.perf_counter(), time.thread_time()
        with self.arrived:
            for token in tokens:
                self.times[token.request].append(now)
                if token.ended:
                    self.ended[token.request].set()
            self.arrived.notify_all()

    def send(self, request: Request) -> Request:
        self.times[request], self.ended[request] = [], threading.Event()
        self.engine.submit([request])
        return request

    def wait(self, counts: Dict[Request, int]) -> None:
        """Wait until each request has so many tokens."""
        with self.arrived:
            while any(len(self.times[request]) < count for request, count in counts.items()):
                self.arrived.wait()

    def first(self, prompt: List[int]) -> float:
        """Return the seconds to the first token of a prompt that runs alone."""
        since = time.perf_counter()
        request = self.send(Request(tuple(prompt), 1))
        self.ended[request].wait()
        return self.times[request][0][0] - since


def known(model: Model, rounds: int) -> Dict[str, List[float]]:
    """Return the ratio of the times to the first token with a known prefix and without sharing, for each round."""
    random, ratios = np.random.default_rng(0), []
    sharing, alone = Timed(model, 10**9), Timed(model, 0)
    for _ in range(rounds + 1):
        begun = random.integers(0, model.manifest.vocabulary, KNOWN).tolist()
        sharing.first([*begun, 0])
        prompt = [*begun, *random.integers(0, model.manifest.vocabulary, NEW).tolist()]
        ratios.append(sharing.first(prompt) / alone.first(prompt))
    for timed in (sharing, alone):
        timed.engine.close()
    return {"first_token_known_prefix": ratios[1:]}  # the first round warms up


def stall(model: Model, rounds: int) -> Dict[str, List[float]]:
    """Return the ratios of times between tokens of running rows while a long prompt is read and of the median before and after, for each round."""
    random = np.random.default_rng(1)
    found: Dict[str, List[float]] = {}
    timed = Timed(model, 0)
    for turn in range(rounds + 1):
        rows = [timed.send(Request((index,), LONG)) for index in range(RUNNING)]
        timed.wait(dict.fromkeys(rows, AROUND + 1))
        begun = time.perf_counter()
        timed.first(random.integers(0, model.manifest.vocabulary, LONG).tolist())
        ended = time.perf_counter()
        timed.wait({row: len(timed.times[row]) + AROUND for row in rows})
        timed.engine.cancel(rows)
        times = [np.array(timed.times[row]) for row in rows]
        while timed.engine.running:
            time.sleep(0.01)
        for clock, name in (
            enumerate(("", "_processor")) if turn else ()
        ):  # the first round warms up
            gaps = np.concatenate(
                [np.stack((each[1:, 0], np.diff(each[:, clock])), axis=1) for each in times]
            )
            at, gap = gaps[:, 0], gaps[:, 1]
            reading = gap[(at >= begun) & (at <= ended)]
            for side, step in (
                ("before", np.median(gap[at < begun])),
                ("after", np.median(gap[at > ended])),
            ):
                found.setdefault(f"longest_gap{name}_over_steps_{side}", []).append(
                    float(reading.max() / step)
                )
                found.setdefault(f"median_gap{name}_over_steps_{side}", []).append(
                    float(np.median(reading) / step)
                )
    timed.engine.close()
    return found


def _spread(ratios: List[float]) -> Dict[str, float]:
    return {
        "median": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "artefact",
        type=Path,
        help="a decoder for target ort with a range of at least 4,096 positions",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the ratios to this file")
    options = parser.parse_args(arguments)
    model = load(options.artefact, "cpu", options.threads)
    found: Dict[str, Dict[str, float]] = {}
    for measure in (known, stall):
        for name, ratios in measure(model, options.rounds).items():
            found[name] = _spread(ratios)
            print(name, found[name], flush=True)
    if options.json:
        how = {
            "known": KNOWN,
            "new": NEW,
            "long": LONG,
            "running": RUNNING,
            "rounds": options.rounds,
            "threads": options.threads,
        }
        json_rows.write(
            options.json,
            {**how, "results": [{"measure": name, **values} for name, values in found.items()]},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
