"""What prefix sharing saves, and how long running streams wait while a prompt is read.

    python -m bench.prefixes ARTEFACT [--rounds 5] [--threads 2] [--json FILE]

Time to the first token of prompts of 1,000 + 50 tokens, whose first 1,000 are known, over that of an engine without memory for prefixes; both take turns. Longest time
between two tokens of 4 running rows while a prompt of 4,000 tokens arrives, over the median time between their tokens before. Medians over rounds, least, most.
"""

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Dict, List, Sequence

import numpy as np

from posenc_export.runtime import load
from posenc_export.runtime.session.model import Model
from posenc_export.serve.engine import Engine
from posenc_export.serve.requests import Limits, Request, Token
from posenc_export.shared import json_rows

KNOWN, NEW, LONG, RUNNING = 1000, 50, 4000, 4
BEFORE = 40  # tokens of each running row before the long prompt arrives


class Timed:
    """An engine, and the times at which the tokens of each request arrived."""

    def __init__(self, model: Model, memory: int) -> None:
        self.times: Dict[Request, List[float]] = {}
        self.ended: Dict[Request, threading.Event] = {}
        self.arrived = threading.Condition()
        self.engine = Engine(model, Limits(RUNNING + 1, 64, LONG + 96, LONG + 8, LONG, 256, prefix_memory=memory), self.take)

    def take(self, tokens: List[Token]) -> None:
        now = time.perf_counter()
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

    def first(self, prompt: List[int]) -> float:
        """Return the seconds to the first token of a prompt that runs alone."""
        since = time.perf_counter()
        request = self.send(Request(tuple(prompt), 1))
        self.ended[request].wait()
        return self.times[request][0] - since


def known(model: Model, rounds: int) -> List[float]:
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
    return ratios[1:]  # the first round warms up


def stall(model: Model, rounds: int) -> List[float]:
    """Return the ratio of the longest time between two tokens of running rows while a long prompt is read and of the median before, for each round."""
    random, ratios = np.random.default_rng(1), []
    timed = Timed(model, 0)
    for _ in range(rounds + 1):
        rows = [timed.send(Request((index,), LONG)) for index in range(RUNNING)]
        with timed.arrived:
            while any(len(timed.times[row]) <= BEFORE for row in rows):
                timed.arrived.wait()
        arrived = time.perf_counter()
        timed.first(random.integers(0, model.manifest.vocabulary, LONG).tolist())
        timed.engine.cancel(rows)
        gaps = [(after, after - before) for row in rows for before, after in zip(timed.times[row], timed.times[row][1:], strict=False)]
        while timed.engine.running:
            time.sleep(0.01)
        step = statistics.median(gap for after, gap in gaps[len(rows) :] if after < arrived)
        ratios.append(max(gap for after, gap in gaps if after >= arrived) / step)
    timed.engine.close()
    return ratios[1:]


def _spread(ratios: List[float]) -> Dict[str, float]:
    return {"median": round(statistics.median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artefact", type=Path, help="a decoder for target ort with a range of at least 4,096 positions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the ratios to this file")
    options = parser.parse_args(arguments)
    model = load(options.artefact, "cpu", options.threads)
    found: Dict[str, Dict[str, float]] = {}
    for name, measure in (("first_token_known_prefix", known), ("longest_gap_in_steps", stall)):
        found[name] = _spread(measure(model, options.rounds))
        print(name, found[name], flush=True)
    if options.json:
        how = {"known": KNOWN, "new": NEW, "long": LONG, "running": RUNNING, "rounds": options.rounds, "threads": options.threads}
        json_rows.write(options.json, {**how, "results": [{"measure": name, **values} for name, values in found.items()]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
